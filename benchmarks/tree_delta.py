"""A token tree of the gated delta rule beside one node and rows of products: `python -m benchmarks.tree_delta`.

The shape is that of a layer of Qwen3-Next: 16 groups, 32 heads, states of 128 x 128. States of several layers take
turns, so each comes from memory. A tree of 8 nodes is compared with one node plus 7 rows of products, whose states are
in the caches. A row of products is what a node needs of its state: the products with key and query, and the addition
of key times correction. torch computes all rows of a layer at once, in three batched matrix products, which no tree
allows: its nodes need the states of their parents. All sides are timed in interleaved rounds. The record replaces that
of the same machine and number of threads. Tests: tests/benchmarks/test_tree_delta.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from benchmarks.harness.interleave import environment, interleave
from benchmarks.harness.result_files import read_rows, write_whole
from benchmarks.harness.select_rows import RESULTS
from specdec_kernels import tree_delta

TABLE = "tree_delta_cpu.json"
GROUPS, HEADS, SIZE = 16, 32, 128
TREE = [-1, 0, 0, 1, 1, 2, 2, 3]
ONE, ROWS = "1 node", "7 rows of products"
TREES: dict[str, tuple[int, list[int] | None]] = {
    ONE: (1, None),
    "8 in a chain": (8, None),
    "8 in a tree": (8, TREE),
}


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def tree_side(nodes: int, parents: list[int] | None, states: list[Tensor]) -> Callable[[], Any]:
    """Returns a side that runs `tree_delta` on the state [1, H, K, V] of every layer."""
    query, key = (normalize(torch.randn(nodes, GROUPS, SIZE), dim=-1).bfloat16() for _ in range(2))
    value, beta = torch.randn(nodes, HEADS, SIZE).bfloat16(), torch.rand(nodes, HEADS).bfloat16()
    gate, where = -torch.rand(nodes, HEADS), (int32([0]), int32([9]), int32([0, nodes]))
    tree = None if parents is None else int32(parents)

    def run() -> None:
        for state in states:
            tree_delta(query * SIZE**-0.5, key, value, gate, beta, state, *where, tree)

    return run


def rows_side(rows: int, layers: int) -> Callable[[], Any]:
    """Returns a side that computes rows of products, for as many layers, on one state, which stays in the caches."""
    state, work = (torch.randn(HEADS, SIZE, SIZE) for _ in range(2))
    query, key, correction = (torch.randn(HEADS, rows, SIZE) for _ in range(3))

    def run() -> None:
        for _ in range(layers):
            torch.bmm(key, state)
            torch.baddbmm(state, key.mT, correction, out=work)
            torch.bmm(query, work)

    return run


def measure(threads: int, layers: int, rounds: int) -> dict[str, Any]:
    """Returns the row of a number of threads: microseconds for each layer, and shares of one node plus the rows."""
    torch.set_num_threads(threads)
    states = [torch.randn(1, HEADS, SIZE, SIZE) for _ in range(layers)]
    sides = {name: tree_side(*tree, states) for name, tree in TREES.items()}
    with torch.inference_mode():
        timing = interleave({**sides, ROWS: rows_side(len(TREE) - 1, layers)}, rounds)
    sums = [one + more for one, more in zip(timing.seconds[ONE], timing.seconds[ROWS], strict=True)]
    return {
        "threads": threads,
        "layers": layers,
        "rounds": rounds,
        "microseconds_per_layer": {name: timing.median(name) * 1e6 / layers for name in timing.seconds},
        "share_of_one_node_and_rows": {
            name: median(own / total for own, total in zip(timing.seconds[name], sums, strict=True))
            for name in sides
            if name != ONE
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path, default=RESULTS / TABLE)
    asked = parser.parse_args()
    facts = environment()
    for threads in asked.threads:
        row = {**measure(threads, asked.layers, asked.rounds), "environment": facts}
        others = [each for each in read_rows(asked.out) if _key(each) != _key(row)]
        write_whole(asked.out, {"rows": sorted([*others, row], key=_key)})
        times = ", ".join(f"{name} {time:.0f} us" for name, time in row["microseconds_per_layer"].items())
        shares = ", ".join(f"{name} {share:.2f}" for name, share in row["share_of_one_node_and_rows"].items())
        print(f"{threads} threads: {times}; of one node and 7 rows: {shares}", flush=True)


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    """The machine and the setting of a row."""
    facts = row["environment"]
    return facts["cpu"], facts["isa"], row["threads"]


if __name__ == "__main__":
    main()
