"""The page of supported methods names every drafter and every rule, and each drafter has a section in the guide."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from specdec_fast.drafters import drafter_names
from specdec_fast.rules import rule_names

PAGE = "docs/getting-started/support.md"
GUIDE = "docs/guides/choosing-a-drafter.md"


@pytest.fixture
def page(root: Path) -> str:
    return (root / PAGE).read_text(encoding="utf-8")


def named(text: str, known: list[str]) -> list[str]:
    """Code spans that begin with a known name, once each."""
    return sorted({span for span in re.findall(r"`(\w+)[^`]*`", text) if span in known})


def test_the_table_has_every_drafter(page: str) -> None:
    section = page.partition("\n## Drafters\n")[2].partition("\n## ")[0]
    table = "\n".join(line for line in section.splitlines() if line.startswith("|"))
    assert named(table, drafter_names()) == drafter_names()


def test_the_overview_has_every_rule(page: str) -> None:
    (line,) = (line for line in page.splitlines() if line.startswith("| rules |"))
    assert named(line, rule_names()) == sorted(rule_names())


def test_the_guide_has_a_section_for_every_drafter(root: Path) -> None:
    headings = re.findall(r"^## `?(\w+)`?$", (root / GUIDE).read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert set(drafter_names()) <= set(headings)
