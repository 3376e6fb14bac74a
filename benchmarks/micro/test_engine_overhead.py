"""Engine time outside model forwards, per step at batch 1: propose, plan, verify, commit, append of the bundled pair.

The forward passes of target and draft model are timed apart and taken off; what is left is ours. A chain that is
drafted in one call counts as forwards but for its picks: these are timed by themselves and added. `alone` is a step
that somebody calls, `in_generate` one of `Engine.generate`, which enters inference mode once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from statistics import median
from time import perf_counter
from typing import Any

import pytest
import torch

from specdec_fast import Engine, HuggingFaceTarget, SamplingParams, load
from specdec_kernels import distribution_stats, replay_sample


class ForwardClock:
    """Wraps forwards of models, chains of them too, and adds up the seconds spent in them."""

    def __init__(self, *models: HuggingFaceTarget) -> None:
        self.seconds = 0.0
        for model in models:
            if model.fused_forward is None:
                model._logits = self._timed(model._logits)
            else:
                fused = model.fused_forward
                fused.run, fused.run_chain = map(self._timed, (fused.run, fused.run_chain))

    def _timed(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            start = perf_counter()
            try:
                return forward(*arguments, **named)
            finally:
                self.seconds += perf_counter() - start

        return run


def overhead(engine: Engine, clock: ForwardClock, temperature: float, steps: int, inside: bool) -> list[float]:
    """Seconds outside forwards of each of `steps` steps."""
    params = SamplingParams(temperature=temperature, seed=0, max_new_tokens=900, ignore_eos=True)
    handle = engine.submit(list(range(20, 60)), params)
    found = []
    with torch.inference_mode() if inside else nullcontext():
        for step in range(steps + 20):
            clock.seconds, start = 0.0, perf_counter()
            engine.step()
            outside = perf_counter() - start - clock.seconds
            if handle.finished:
                break
            if step >= 20:
                found.append(outside)
    engine.cancel(handle)
    return found


def picking(vocab: int, temperature: float, count: int, rows: int = 16) -> float:
    """Seconds of `count` picks as a chain makes them: of many rows at once, so that the call is no part of it."""
    logits, one = torch.randn(rows, vocab) * 3, torch.ones(rows)
    seeds, position, none = torch.arange(rows), torch.ones(rows, dtype=torch.int32), torch.zeros(rows)
    kept = (one, torch.full((rows,), float("-inf")), torch.full((rows,), vocab - 1, dtype=torch.int32))
    threads, found = torch.get_num_threads(), []
    torch.set_num_threads(1)
    for _ in range(200):
        start = perf_counter()
        if temperature:
            replay_sample(logits, *kept, seeds, position)
        else:
            distribution_stats(logits, none, none.int(), one, none)
        found.append(perf_counter() - start)
    torch.set_num_threads(threads)
    return median(found) / rows * count


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafter", ["draft_model", "ngram", "plain"])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_engine_overhead(benchmark: Any, dtype: str, threads: int, drafter: str, temperature: float) -> None:
    """Eager. dtype: the target's."""
    torch.set_num_threads(threads)
    draft = "demo-draft" if drafter == "draft_model" else None
    engine = load("demo-target", draft, drafter="none" if drafter == "plain" else drafter, max_length=1024, dtype=dtype)
    made: Any = engine.drafter
    clock = ForwardClock(engine.target, *([made.model] if draft else []))
    picks = picking(engine.target.vocab_size, temperature, made.num_draft_tokens) if draft else 0.0
    found: dict[bool, list[float]] = {False: [], True: []}

    def rounds() -> None:
        for inside in (False, True) * 3:
            found[inside].extend(overhead(engine, clock, temperature, 120, inside))

    benchmark.pedantic(rounds, rounds=1)
    benchmark.extra_info |= {
        **{
            f"overhead_ms_per_step_{how}": round(1e3 * (median(found[inside]) + picks), 4)
            for how, inside in (("alone", False), ("in_generate", True))
        },
        "picks_ms": round(1e3 * picks, 4), "compiled": False,
    }  # fmt: skip
    print(f"\n{dtype}, {drafter}, {threads} threads, T = {temperature}: {benchmark.extra_info}")
