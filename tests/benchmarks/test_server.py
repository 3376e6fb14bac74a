"""The benchmark of the server: texts are compared, clients leave, and rows are replaced by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from oracles.toy_server import make_engine

from benchmarks.server import overhead, record, resident_mib, stress

PROMPTS = [[at, 5, 9] for at in range(1, 5)]


def test_both_ways_write_the_same_amount() -> None:
    row = overhead(make_engine(drafter=None), PROMPTS, tokens=6, rounds=2, streams=2, clock="cpu")
    assert row["tau"] == 1 and row["engine_tokens_per_s"] > 0
    for side in ("stream", "whole"):
        low, high = row[f"{side}_vs_engine_spread"]
        assert 0 < low <= row[f"{side}_vs_engine"] <= high


def test_stress_counts_what_came_back() -> None:
    engine = make_engine(max_length=1024)
    row = stress(engine, PROMPTS, requests=30)
    assert sum(row["outcomes"].values()) == 30 and not any("wrong" in name for name in row["outcomes"])
    outcomes = {name.partition(", ")[2] for name in row["outcomes"]}
    assert {"right", "left early"} <= outcomes <= {"right", "left early", "ended before its client left"}
    assert row["pages_in_use_after"] == row["rows_in_use_after"] == 0 and len(row["resident_mib"]) == 10


def test_a_wrong_text_is_seen() -> None:
    """A target that changes under the server."""
    engine = make_engine(max_length=1024)
    generate = engine.generate

    def change_afterwards(*args: Any, **options: Any) -> Any:
        found = generate(*args, **options)
        engine.target.table = engine.target.table.roll(1, 1)
        return found

    engine.generate = change_afterwards  # type: ignore[method-assign]
    outcomes = stress(engine, PROMPTS, requests=20)["outcomes"]
    assert any("wrong" in name for name in outcomes)


def test_rows_are_replaced_by_name(tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    for name, value in (("a", 1), ("b", 2), ("a", 3)):
        record({"name": name, "value": value}, out)
    assert [(row["name"], row["value"]) for row in json.loads(out.read_text())["rows"]] == [("b", 2), ("a", 3)]
    assert resident_mib() > 10
