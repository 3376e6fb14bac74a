"""The project's root, its files and its documents."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from documents.source_tree import ROOT, all_documents, listed_files


@pytest.fixture
def root() -> Path:
    return ROOT


@pytest.fixture
def listed() -> Callable[[Path], list[Path]]:
    return listed_files


@pytest.fixture
def documents() -> list[Path]:
    return all_documents(ROOT)


@pytest.fixture
def write(tmp_path: Path) -> Callable[[dict[str, str]], list[Path]]:
    """Writes files below tmp_path and returns their paths."""

    def written(sources: dict[str, str]) -> list[Path]:
        for name, text in sources.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return [tmp_path / name for name in sources]

    return written
