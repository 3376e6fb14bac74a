"""The project's root and its files, for tests that look at the source tree."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from documents.source_tree import ROOT, listed_files


@pytest.fixture
def root() -> Path:
    return ROOT


@pytest.fixture
def listed() -> Callable[[Path], list[Path]]:
    """Files of a tree: those that git tracks or would track, or all that are not generated where there is no git."""
    return listed_files
