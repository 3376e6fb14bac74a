"""The benchmark of the hybrid target: its rows, and the committed result."""

from __future__ import annotations

import json

from benchmarks import hybrid_models


def test_a_row_compares_the_same_texts() -> None:
    row = hybrid_models.measure(1.0, 1, prompts=2, new_tokens=4, draft_tokens=2, rounds=2)
    assert row["same_texts"] and row["prompts"] == 2 and 1.0 <= row["tau"] <= 3.0
    low, high = row["speedup_range"]
    assert 0.0 < low <= row["speedup"] <= high
    assert row["speedup_over_transformers"] > 0
    assert hybrid_models.as_markdown([row]).splitlines()[-1].startswith("| `1` | ")


def test_drafts_pay_in_the_committed_result() -> None:
    rows = json.loads((hybrid_models.RESULTS / hybrid_models.TABLE).read_text())["rows"]
    assert [row["temperature"] for row in rows if row["threads"] == 2] == [0.0, 1.0]
    for row in rows:
        assert row["same_texts"] and row["speedup"] >= 1.5, row["temperature"]
        assert row["environment"]["cores"] and row["environment"]["torch"]
