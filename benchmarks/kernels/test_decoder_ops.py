"""A pass of the bundled models as one operator, fused_forward, beside the model's own modules, eager and compiled; and
chains of the draft as one, draft_chain, beside passes and picks one at a time.

The sides take turns in one run. warm: one pass after the other, as nothing else does in a step; cold: 32 MB of other
memory are read before each, as a target's pass leaves the caches to its draft's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import pytest
import torch

from specdec_fast import HuggingFaceTarget
from specdec_fast.loading import load_model
from specdec_fast.sampling.sampling_tensors import SamplingTensors
from specdec_fast.targets.fused_forward import why_not_fused
from specdec_kernels.dispatch import extension

pytestmark = pytest.mark.skipif(extension.unavailable_reason() is not None, reason="CPU extension not built")
CONTEXT, ROUNDS = 200, 60
SIDES: dict[str, dict[str, Any]] = {"modules": {}, "compiled": {"compile": True}, "whole": {"fused_forward": True}}


def side(name: str, rows: int, nodes: int, **how: Any) -> Callable[[], float]:
    """Seconds of a pass over `nodes` tokens of each row, which are forgotten afterwards."""
    target = HuggingFaceTarget(load_model(name), max_rows=rows, max_length=CONTEXT + 32, **how)
    if how.get("fused_forward"):
        assert why_not_fused(target.model) is None
    batch = torch.arange(rows, dtype=torch.int32)
    for row in range(rows):
        assert target.cache.reserve(row, CONTEXT + nodes)
    ends = torch.arange(rows + 1, dtype=torch.int32)
    target.extend(batch, torch.arange(rows * CONTEXT) * 7 % 1000, ends * CONTEXT, logits=False)
    tokens, offsets = torch.arange(rows * nodes) * 11 % 1000, ends * nodes

    def run() -> float:
        target.cache.rollback(batch, torch.full((rows,), CONTEXT, dtype=torch.int32))
        start = time.perf_counter()
        target.extend(batch, tokens, offsets, logits=True)
        return time.perf_counter() - start

    return run


def by_turns(runs: dict[str, Callable[[], float]], state: str) -> dict[str, list[float]]:
    """Seconds of every round; cold: with other memory read before each."""
    found: dict[str, list[float]] = {how: [] for how in runs}
    swept = torch.zeros(2**23)
    for _ in range(ROUNDS):
        for how, run in runs.items():
            run()
            if state == "cold":
                swept.add_(1)
            found[how].append(run())
    return found


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("name", "rows", "nodes"),
    [("demo-draft", 1, 1), ("demo-draft", 8, 1), ("demo-target", 1, 1), ("demo-target", 1, 5), ("demo-target", 8, 3)],
)
def test_fused_forward(benchmark: Any, name: str, rows: int, nodes: int, threads: int) -> None:
    torch.set_num_threads(threads)
    with torch.inference_mode():
        runs = {how: side(name, rows, nodes, **options) for how, options in SIDES.items()}
        for run in [*runs.values()] * 3:  # compiled code of two shapes
            run()
        for state in ("warm", "cold"):
            found = by_turns(runs, state)
            benchmark.extra_info |= {f"{how}_{state}_us": round(median(each) * 1e6) for how, each in found.items()}
            for how in ("modules", "compiled"):
                ratio = median(one / two for one, two in zip(found[how], found["whole"], strict=True))
                benchmark.extra_info[f"times_faster_than_{how}_{state}"] = round(ratio, 2)
        benchmark(runs["whole"])
    print(f"\n{name}, {rows} rows of {nodes}, {threads} threads: {benchmark.extra_info}")
    torch.set_num_threads(1)


def chained(rows: int, drafts: int, together: bool) -> Callable[[], float]:
    """Seconds of a chain of each row at T = 1, which is forgotten afterwards."""
    target = HuggingFaceTarget(load_model("demo-draft"), max_rows=rows, max_length=CONTEXT + 32, fused_forward=True)
    whole, batch = target.fused_forward, torch.arange(rows, dtype=torch.int32)
    ends = torch.arange(rows + 1, dtype=torch.int32)
    assert whole is not None
    for row in range(rows):
        assert target.cache.reserve(row, CONTEXT + drafts)
    target.extend(batch, torch.arange(rows * CONTEXT) * 7 % 1000, ends * CONTEXT, logits=False)
    tokens, last, one = torch.arange(rows) * 11 % 1000, ends[1:].long() - 1, torch.ones(rows)
    seeds, roots = torch.arange(rows), torch.full((rows,), CONTEXT, dtype=torch.int32)
    sampling = SamplingTensors(one, (0 * one).int(), one, 0 * one, seeds, any_greedy=False, any_filter=False)
    asked = sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, seeds, roots

    def apart() -> None:
        fed = tokens
        for level in range(drafts):
            logits = target.extend(batch, fed, ends, logits=last).logits
            assert logits is not None
            fed = sampling.sample_replay(logits, roots + level + 1)

    def run() -> float:
        target.cache.rollback(batch, roots)
        start = time.perf_counter()
        if together:
            whole.chain(batch, tokens, ends, [drafts] * rows, *asked, target.vocab_size, None)
        else:
            apart()
        return time.perf_counter() - start

    return run


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("rows", "drafts"), [(1, 4), (8, 4)])
def test_draft_chain(benchmark: Any, rows: int, drafts: int, threads: int) -> None:
    torch.set_num_threads(threads)
    with torch.inference_mode():
        runs = {how: chained(rows, drafts, how == "together") for how in ("apart", "together")}
        for state in ("warm", "cold"):
            found = by_turns(runs, state)
            benchmark.extra_info |= {f"{how}_{state}_us": round(median(each) * 1e6) for how, each in found.items()}
            ratio = median(one / two for one, two in zip(found["apart"], found["together"], strict=True))
            benchmark.extra_info[f"times_faster_{state}"] = round(ratio, 2)
        benchmark(runs["together"])
    print(f"\n{rows} rows of {drafts}, {threads} threads: {benchmark.extra_info}")
    torch.set_num_threads(1)
