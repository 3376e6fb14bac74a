"""Speed of verification on trees on the CPU, beside one plain read (sum) of the logits of the same nodes.

    python -m pytest benchmarks/kernels/test_verify_tree_ops.py -s

Machines share caches and ports with other work: trust ratios of one run and minima, not absolute times.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec_kernels import (
    distribution_stats,
    draft_sample,
    recursive_rejection_verify,
    traversal_verify,
    tree_plan,
    typical_verify,
)
from specdec_kernels.dispatch import extension

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(extension.unavailable_reason() is not None, reason="CPU extension not built"),
]

VOCAB = 151_936
OPERATORS = [recursive_rejection_verify, traversal_verify]
# values of ProposalKind
KINDS = {"deterministic": [0, 0, 0], "independent": [1, 1, 1], "without_replacement": [1, 2, 2], "hybrid": [3, 0, 0]}


def dist(logits: Tensor) -> tuple[Tensor, ...]:
    rows = len(logits)
    zero = torch.zeros(rows, dtype=torch.int32)
    return (logits, *distribution_stats(logits, torch.ones(rows), zero, torch.ones(rows), torch.zeros(rows)))


def tree(marks: list[int], rows: int, noise: float, vocab: int = VOCAB) -> tuple[tuple[Any, ...], Tensor]:
    """Arguments of both operators for rows of two levels of three siblings each, and the logits of all nodes."""
    g = torch.Generator().manual_seed(0)
    parents = torch.tensor([-1, 0, 0, 0, 1, 1, 1], dtype=torch.int32).repeat(rows)
    count = len(parents)
    p = torch.randn(count, vocab, generator=g) * 2
    q = p + noise * torch.randn(count, vocab, generator=g)
    proposal_kinds = torch.tensor([0, *marks, *marks], dtype=torch.int8).repeat(rows)
    tokens = torch.zeros(count, dtype=torch.int64)
    source = torch.tensor([0, 0, 0, 0, 1, 1, 1]).repeat(rows) + torch.arange(rows).repeat_interleave(7) * 7
    top = q.topk(3, 1).indices
    for start in range(0, count, 7):
        for first in (1, 4):
            gone: list[int] = []
            for place, mark in enumerate(marks):
                node, logits = start + first + place, q[source[start + first]].clone()
                if mark == 0:
                    tokens[node] = top[source[node], place - marks.count(3)]
                    continue
                logits[gone if mark == 2 else top[source[node], : marks.count(0)] if mark == 3 else []] = -float("inf")
                seed, at = torch.tensor([node]), torch.tensor([place], dtype=torch.int32)
                tokens[node] = draft_sample(*dist(logits[None]), seed, at, at)
                gone.append(int(tokens[node]))
    offsets = torch.arange(0, count + 1, 7, dtype=torch.int32)
    plan = tree_plan(parents, offsets)
    seeds, positions = torch.arange(rows), torch.arange(rows, dtype=torch.int32)
    draft_dist = None if not any(marks) else dist(q)
    arguments = (
        tokens,
        offsets,
        plan.first_child,
        plan.next_sibling,
        proposal_kinds,
        source.int(),
        dist(p),
        draft_dist,
        None,
    )
    return (*arguments, None, seeds, positions), p


def best(functions: list[Callable[[], Any]], rounds: int) -> list[float]:
    """Smallest time of each, in microseconds; they take turns, so that a busy moment hits all of them."""
    times = [float("inf")] * len(functions)
    for _ in range(rounds):
        for i, function in enumerate(functions):
            start = time.perf_counter()
            function()
            times[i] = min(times[i], time.perf_counter() - start)
    return [t * 1e6 for t in times]


@pytest.mark.parametrize("noise", [0.3, 2.0], ids=["near", "far"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
def test_a_step(benchmark: Any, operator: Any, kind: str, noise: float) -> None:
    arguments, logits = tree(KINDS[kind], 4, noise)

    def run() -> Any:
        return operator(*arguments, max_depth=2)

    read, verify = best([logits.sum, run], 60)
    benchmark.extra_info |= {"sum_us": round(read, 1), "verify_us": round(verify, 1), "ratio": round(verify / read, 2)}
    print(f"\n{operator.name} {kind}: sum {read:.0f} us, verify {verify:.0f} us, ratio {verify / read:.2f}")
    benchmark.pedantic(run, rounds=5)


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
def test_a_small_step(benchmark: Any, operator: Any) -> None:
    arguments, _ = tree(KINDS["hybrid"], 1, 0.3, 1000)
    benchmark(lambda: operator(*arguments, max_depth=2))


def test_typical_acceptance(benchmark: Any) -> None:
    """Every node with children has its entropy summed: two passes over its distribution."""
    (*links, _, _, target, _, _, score_only, seeds, positions), logits = tree(KINDS["deterministic"], 4, 0.3)
    limit = {"epsilon": 0.09, "delta": 0.3, "max_depth": 2}

    def run() -> Any:
        return typical_verify(*links, target, score_only, seeds, positions, **limit)

    read, verify = best([logits.sum, run], 20)
    benchmark.extra_info |= {"sum_us": round(read, 1), "verify_us": round(verify, 1), "ratio": round(verify / read, 2)}
    benchmark.pedantic(run, rounds=5)
