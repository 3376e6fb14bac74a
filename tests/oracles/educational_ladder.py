"""The files of the ladder to tree attention, for its tests in the interpreter and outside of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
LADDER = ROOT / "kernels" / "educational" / "tree_attention"
SOURCES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(LADDER.glob("*.py"))}
"""Source of each file, by module name."""


@pytest.fixture(autouse=True)
def on_path() -> Iterator[None]:
    """Puts the folder of the files first in the path, since they import each other as programs do."""
    sys.path.insert(0, str(LADDER))
    yield
    sys.path.remove(str(LADDER))


def module(name: str) -> ModuleType:
    """Imports a file of the ladder; only while its folder is in the path."""
    return import_module(name)
