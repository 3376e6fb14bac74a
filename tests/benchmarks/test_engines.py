"""The table of other engines: its commands, its page, and the committed results."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import engines
from specdec_fast.lab.engines.settings import ENGINES
from specdec_fast.lab.engines.verdict import LEVEL, Row

SAMPLING = {"temperature": 0.9, "top_k": 0, "top_p": 1.0}


def test_engines_run_in_the_interpreters_that_are_named() -> None:
    one, other = engines.commands(["transformers", "vllm=there/python"], Path("out"), 7)
    assert one[:6] == [sys.executable, "-m", "specdec_fast", "lab", "--engine", "transformers"]
    assert "--python" not in one
    assert other[-2:] == ["--python", "there/python"] and other[other.index("--draws") + 1] == "7"


def test_tables_replace_those_of_the_page() -> None:
    row = Row("vllm", {"vllm": "1.0"}, "plain", "no drafts", False, SAMPLING, verdict="matches").as_dict()
    page = "# A\n<!-- tables: begin -->\nold\n<!-- tables: end -->\nend\n"
    found = engines.with_tables(page, [row], "results.json")
    assert "old" not in found and "### vllm 1.0" in found and "<!-- results: results.json -->\n| setting" in found
    assert engines.with_tables(found, [row], "results.json") == found
    with pytest.raises(ValueError, match=r"got no lines `<!-- tables: begin -->`"):
        engines.with_tables("# A\n", [row], "results.json")


def test_the_committed_page_shows_the_committed_results() -> None:
    rows = json.loads((engines.RESULTS / engines.TABLE).read_text())["rows"]
    page = engines.PAGE.read_text()
    assert engines.with_tables(page, rows, f"benchmarks/results/{engines.TABLE}") == page
    for row in rows:
        assert row["setting"] in {each.name for each in ENGINES[row["engine"]]}
        if row["verdict"] == "matches":
            assert row["p_value"] >= LEVEL and row["greedy"][0] == row["greedy"][1]
        if row["own"] and row["verdict"] != "did not run":
            assert row["verdict"] == "matches" and row["seeds"][0] == row["seeds"][1]
