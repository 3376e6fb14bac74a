"""Rows in a folder and as tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specdec_fast.lab.engines.table import add_rows, as_markdown, read_rows
from specdec_fast.lab.engines.verdict import Row

FULL: dict[str, Any] = {"temperature": 0.9, "top_k": 0, "top_p": 1.0}


def row(setting: str = "plain", version: str = "1.0", **more: Any) -> dict[str, Any]:
    return Row("vllm", {"vllm": version, "torch": "2"}, setting, "no drafts", False, dict(FULL), **more).as_dict()


def test_a_row_replaces_an_earlier_one_about_the_same(tmp_path: Path) -> None:
    add_rows(tmp_path, [row(), row("ngram")])
    found = add_rows(tmp_path, [row(verdict="matches"), row(version="1.1")])
    assert [(each["setting"], each["versions"]["vllm"], each["verdict"]) for each in found] == [
        ("plain", "1.0", "matches"),
        ("ngram", "1.0", "did not run"),
        ("plain", "1.1", "did not run"),
    ]
    assert len(read_rows(tmp_path)) == 3 and not list(tmp_path.glob("*.part"))


def test_tables_show_what_was_found() -> None:
    good = row(
        distance=0.0312,
        limit=0.05,
        first_at_most=0.081,
        p_value=0.25,
        greedy=(8, 8),
        seeds=(16, 16),
        sampled_batch=(15, 16),
        verdict="matches",
    )
    bad = row("ngram", distance=0.7, limit=0.05, p_value=0.0, greedy=(8, 8), verdict="differs", note="Known.")
    table = as_markdown([good, bad, row("draft", reason="no draft")])
    assert "### vllm 1.0, torch 2" in table
    assert "| `plain`: no drafts | T 0.9 | 0.031 (0.050) | ≤ 0.081 | 0.25 | matches | 8/8 | 16/16 | 15/16 |" in table
    assert "| 0.700 (0.050) | - | < 1e-05 | **differs** | 8/8 | - | - |" in table
    assert "- `ngram`: Known." in table and "- `draft` did not run: no draft" in table
    failed = row("ngram", greedy=(8, 8), reason="batch: no text; draws 1: ValueError: got 7; expected 8; alone 1: no")
    assert "- `ngram` did not run at T 0.9: ValueError: got 7; expected 8\n" in as_markdown([failed]) + "\n"


def test_another_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "engines.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"is no result of `specdec lab --engine`"):
        add_rows(tmp_path, [row()])
    assert (tmp_path / "engines.json").read_text() == "[1]"
