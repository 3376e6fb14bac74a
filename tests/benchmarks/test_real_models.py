"""The benchmark of real models: all sides write the same texts, and rows name their setting."""

from __future__ import annotations

import json
from time import perf_counter
from typing import Any

import pytest

from benchmarks import real_models
from benchmarks.harness.select_rows import RESULTS
from benchmarks.real_models import KEYS, PEER, PLAIN, SIDES, Setting, as_markdown, measure, merged
from specdec_fast.adaptive.budget import Goodput


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    setting = Setting("float32", 1, 0.0, 6)
    return list(measure("demo-target", setting, [PEER, "auto"], ["list"], rounds=2, clock=perf_counter, peer_rounds=1))


def test_all_sides_write_the_text_of_plain_decoding(rows: list[dict[str, Any]]) -> None:
    assert [row["side"] for row in rows] == [PLAIN, PEER, "auto"]
    assert all(row["identical"] for row in rows) and rows[0]["speed_vs_plain"] == 1.0
    assert all(row["tokens_per_second"] > 0 and row["tau"] >= 1 for row in rows)
    assert [row["rounds"] for row in rows] == [2, 1, 2] and all(row["speed_vs_transformers"] for row in rows)


def test_a_budget_begins_every_text_with_what_load_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    known, nodes = [], Goodput.nodes

    def noted(self: Goodput, *given: Any) -> list[int]:
        known.append(sum(self._verify_times.counts.values()))
        return nodes(self, *given)

    monkeypatch.setattr(Goodput, "nodes", noted)
    side = "suffix with budget goodput"
    rounds = 2
    (row,) = (
        row
        for row in measure("demo-target", Setting("float32", 1, 0.0, 6), [side], ["list"], rounds, perf_counter)
        if row["side"] == side
    )
    assert row["identical"] and known.count(0) == rounds + 1 and max(known) > 0


def test_the_table_has_a_line_per_row(rows: list[dict[str, Any]]) -> None:
    own = {"model": "m", "dtype": "float32", "threads": 1, "temperature": 0.0}
    table = as_markdown([{**own, **row} for row in rows]).splitlines()
    assert len(table) == 5 and all(line.count("|") == 13 for line in table)


def test_a_row_replaces_its_own() -> None:
    one, two = (dict.fromkeys(KEYS, name) for name in "ab")
    assert merged([one, two], {**one, "tau": 2}) == [two, {**one, "tau": 2}]


def test_a_model_without_a_name_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: Any, tmp_path: Any) -> None:
    monkeypatch.setattr("sys.argv", ["real_models", "--model", "somewhere", "--out", str(tmp_path / "rows.json")])
    with pytest.raises(SystemExit):
        real_models.main()
    assert "expected NAME=PLACE" in capsys.readouterr().err


def test_recorded_texts_are_those_of_plain_decoding() -> None:
    recorded = json.loads((RESULTS / real_models.TABLE).read_text(encoding="utf-8"))["rows"]
    assert {row["side"] for row in recorded} <= {PEER, *SIDES}
    assert all(row["identical"] for row in recorded if row["side"] != PEER)
