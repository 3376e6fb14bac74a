"""The glossary defines each term once, by names that the code has."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

Listed = Callable[[Path], list[Path]]
CODE = "specdec_fast", "kernels", "benchmarks", "Makefile"


@pytest.fixture
def terms(root: Path) -> list[list[str]]:
    """Cells of all rows: the term, its meaning, its names in the code, and elsewhere."""
    lines = (root / "docs" / "glossary.md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    found = [cells for cells in rows if cells[0] not in ("term", "---")]
    assert len(found) > 50, "they are not found"
    return found


def test_terms_are_defined_once(terms: list[list[str]]) -> None:
    assert all(len(cells) == 4 for cells in terms)
    names = [cells[0] for cells in terms]
    assert [name for name in names if names.count(name) > 1] == []


def test_names_of_the_code_exist(root: Path, listed: Listed, terms: list[list[str]]) -> None:
    sources = [path for path in listed(root) if path.relative_to(root).parts[0] in CODE]
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources if path.suffix in (".py", ""))
    known = {
        *re.findall(r"\w+", text),
        *(part for path in sources for part in path.relative_to(root).with_suffix("").parts),
    }
    named = {
        name for cells in terms for span in re.findall(r"`([^`]+)`", cells[2]) for name in re.findall(r"\w{2,}", span)
    }
    assert sorted(named - known - {"py"}) == []
