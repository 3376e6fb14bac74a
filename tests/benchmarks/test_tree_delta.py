"""The benchmark of tree_delta: its row, and the committed record."""

from __future__ import annotations

import json

from benchmarks import tree_delta


def test_a_row_compares_trees_with_one_node_and_rows() -> None:
    row = tree_delta.measure(1, 2, 2)
    assert set(row["microseconds_per_layer"]) == {*tree_delta.TREES, tree_delta.ROWS}
    assert all(time > 0 for time in row["microseconds_per_layer"].values())
    assert set(row["share_of_one_node_and_rows"]) == set(tree_delta.TREES) - {tree_delta.ONE}


def test_in_the_record_a_tree_costs_less_than_one_node_and_rows_and_a_half() -> None:
    rows = json.loads((tree_delta.RESULTS / tree_delta.TABLE).read_text())["rows"]
    assert {row["threads"] for row in rows} == {1, 2}
    for row in rows:
        assert max(row["share_of_one_node_and_rows"].values()) <= 1.5
