"""The project's root and its files, for tests that look at the source tree."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GENERATED = {".git", ".venv", "build", "dist", "__pycache__"}


@pytest.fixture
def root() -> Path:
    return ROOT


@pytest.fixture
def listed() -> Callable[[Path], list[Path]]:
    """Files of a tree: what git tracks or would track; all that is not generated where there is no git."""
    return _listed


def _listed(root: Path) -> list[Path]:
    if (root / ".git").exists():
        command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")
        return sorted(root / name for name in set(names) if name and (root / name).is_file())
    found = (path for path in root.rglob("*") if path.is_file() and path.suffix not in (".so", ".o"))
    return sorted(
        path
        for path in found
        if not any(part in GENERATED or part.endswith(".egg-info") for part in path.relative_to(root).parts)
    )
