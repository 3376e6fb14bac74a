"""The benchmark of attached models: both sides write the same texts, and its result is within the limit."""

from __future__ import annotations

import json

import pytest

from benchmarks.attached_generate import RECALLED, RESULTS, SIDES, measure


@pytest.mark.parametrize("name", ["draft_model"])
def test_a_row_is_measured(name: str) -> None:
    row = measure(name, [[33, 279, 391], [5, 6]], tokens=4, rounds=2, clock="cpu")
    assert row["identical"] and row["texts"] == 2 and row["tau"] >= 1
    low, high = row["ratio_of_whole_times_spread"]
    assert 0 < low <= row["ratio_of_whole_times"] <= high
    assert row["attached_over_engine"] > 1 and row["added_ms_per_text"] > 0


def test_the_recorded_cost_is_small() -> None:
    """At most 2 % of 128 tokens, whether drafts are made or not. Texts that are recalled take less than 100 ms.

    The cost of a call does not depend on its text, and transformers' own preparation is most of it.
    """
    rows = json.loads(RESULTS.read_text())["rows"]
    assert [row["decoding"] for row in rows] == list(SIDES)
    for row in rows:
        assert row["identical"] and row["tokens"] == 128 and row["added_ms_per_text"] <= 5
        assert row["attached_over_engine"] <= 1.02 or (row["decoding"] == RECALLED and row["engine_ms_per_text"] < 100)
