"""Speed of the verification operators on the CPU, beside one plain read (sum) of the same logits.

    python -m pytest benchmarks/kernels/test_verify_ops.py

Machines share caches and ports with other work: trust ratios of one run and minima, not absolute times.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec_kernels import chain_verify, draw_sample, extension, law_stats, replay_sample, tree_plan, tree_verify

pytestmark = pytest.mark.skipif(extension.missing() is not None, reason="CPU extension not built")

VOCAB, SMALL = 151_936, 1024
PARAMETERS = [
    {},
    {"t": 0.0},
    {"k": 50},
    {"k": 20_000},
    {"p": 0.95},
    {"m": 0.05},
    {"k": 50, "p": 0.95},
]


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def parameters(rows: int, t: float = 1.0, k: int = 0, p: float = 1.0, m: float = 0.0) -> tuple[Tensor, ...]:
    return (
        torch.full((rows,), t),
        torch.full((rows,), k, dtype=torch.int32),
        torch.full((rows,), p),
        torch.full((rows,), m),
    )


def step(vocab: int, rows: int, nodes: int, dtype: torch.dtype) -> tuple[Callable[[], Any], Tensor]:
    """law_stats and chain_verify of one step with drawn drafts, and the target's logits."""
    torch.manual_seed(0)
    count = rows * nodes
    target = (torch.randn(count, vocab) * 2).to(dtype)
    draft = (target.float() + 0.3 * torch.randn(count, vocab)).to(dtype)
    settings = parameters(count)
    draft_law = (draft, *law_stats(draft, *settings))
    order = torch.arange(count, dtype=torch.int32)
    tokens = draw_sample(*draft_law, order.long(), order, order).roll(1)
    offsets = torch.arange(0, count + 1, nodes, dtype=torch.int32)
    drawn, law_row = torch.ones(count, dtype=torch.int8), (order - 1).clamp(min=0)
    seeds, positions = torch.arange(rows), torch.arange(rows, dtype=torch.int32)

    def run() -> Any:
        law = (target, *law_stats(target, *settings))
        return chain_verify(
            tokens, offsets, drawn, law_row, law, draft_law, None, seeds, positions, max_depth=nodes - 1
        )

    return run, target


def best(functions: list[Callable[[], Any]], rounds: int) -> list[float]:
    """Smallest time of each, in microseconds; they take turns, so that a busy moment hits all of them."""
    times = [float("inf")] * len(functions)
    for _ in range(rounds):
        for i, function in enumerate(functions):
            start = time.perf_counter()
            function()
            times[i] = min(times[i], time.perf_counter() - start)
    return [t * 1e6 for t in times]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_costs_little_more_than_reading_the_logits(benchmark: Any, dtype: torch.dtype) -> None:
    run, target = step(VOCAB, rows=2, nodes=4, dtype=dtype)
    read, verify = best([target.sum, run], 200)
    benchmark.extra_info |= {"sum_us": round(read, 1), "verify_us": round(verify, 1), "ratio": round(verify / read, 2)}
    print(f"\n{dtype}: sum {read:.0f} us, law_stats + chain_verify {verify:.0f} us, ratio {verify / read:.2f}")
    benchmark(run)


def test_reading_the_logits(benchmark: Any) -> None:
    benchmark(step(VOCAB, rows=2, nodes=4, dtype=torch.float32)[1].sum)


def test_small_step(benchmark: Any) -> None:
    run, target = step(SMALL, rows=1, nodes=5, dtype=torch.float32)
    call, verify = best([target[0, :1].neg, run], 2000)
    benchmark.extra_info |= {"neg_us": round(call, 2), "verify_us": round(verify, 2)}
    benchmark(run)


@pytest.mark.parametrize("options", PARAMETERS, ids=str)
def test_law_stats(benchmark: Any, options: dict[str, Any]) -> None:
    logits = torch.randn(8, VOCAB) * 2
    settings = parameters(8, **options)
    benchmark(lambda: law_stats(logits, *settings))


@pytest.mark.parametrize("vocab", [SMALL, VOCAB])
@pytest.mark.parametrize("options", [{}, {"k": 50}], ids=str)
def test_replay_sample(benchmark: Any, vocab: int, options: dict[str, Any]) -> None:
    logits = torch.randn(8, vocab) * 2
    inv_t, _, cut, tie_id = law_stats(logits, *parameters(8, **options))
    seeds, positions = torch.arange(8), torch.arange(8, dtype=torch.int32)
    benchmark(lambda: replay_sample(logits, inv_t, cut, tie_id, seeds, positions))


@pytest.mark.parametrize("vocab", [SMALL, VOCAB])
def test_draw_sample(benchmark: Any, vocab: int) -> None:
    logits = torch.randn(2, vocab) * 2
    law = law_stats(logits, *parameters(2))
    seeds, index = torch.arange(2), torch.arange(2, dtype=torch.int32)
    benchmark(lambda: draw_sample(logits, *law, seeds, index, index))


def test_tree_plan_and_verify(benchmark: Any) -> None:
    parents = int32([-1, 0, 0, 1, 1, 2, 3, 5] * 4)
    offsets = int32([0, 8, 16, 24, 32])
    tokens, choice = torch.arange(32), torch.arange(1, 33)

    def run() -> Any:
        plan = tree_plan(parents, offsets)
        return tree_verify(tokens, offsets, plan.first_child, plan.next_sibling, choice, max_depth=4)

    benchmark(run)
