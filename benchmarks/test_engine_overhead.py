"""Engine time outside model forwards, per step at batch 1: propose, plan, verify, commit, append of the bundled pair.

The forward passes of target and draft model are timed apart and taken off; what is left is ours.
"""

from __future__ import annotations

from statistics import median
from time import perf_counter
from typing import Any

import pytest
import torch

from specdec_fast import Engine, SamplingParams, load


class ForwardClock:
    """Wraps a model's forward and adds up the seconds spent in it."""

    def __init__(self, *models: Any) -> None:
        self.seconds = 0.0
        for model in models:
            model._logits = self._timed(model._logits)

    def _timed(self, forward: Any) -> Any:
        def run(**arguments: Any) -> Any:
            start = perf_counter()
            try:
                return forward(**arguments)
            finally:
                self.seconds += perf_counter() - start

        return run


def overhead(engine: Engine, clock: ForwardClock, temperature: float, steps: int) -> list[float]:
    """Seconds outside forwards of each of `steps` steps."""
    params = SamplingParams(temperature=temperature, seed=0, max_new_tokens=900, ignore_eos=True)
    handle = engine.submit(list(range(20, 60)), params)
    found = []
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


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafter", ["draft_model", "ngram", "plain"])
@pytest.mark.parametrize("threads", [1, 2])
def test_engine_overhead(benchmark, threads: int, drafter: str, temperature: float) -> None:
    """Eager, float32."""
    torch.set_num_threads(threads)
    draft = "demo-draft" if drafter == "draft_model" else None
    engine = load("demo-target", draft, drafter=None if drafter == "plain" else drafter, max_length=1024)
    models = [engine.target] + ([engine.drafter.model] if draft else [])
    clock = ForwardClock(*models)
    seconds: list[float] = []
    benchmark.pedantic(lambda: seconds.extend(overhead(engine, clock, temperature, 120)), rounds=1)
    benchmark.extra_info |= {
        "overhead_ms_per_step_median": round(1e3 * median(seconds), 4), "dtype": "float32", "compiled": False
    }  # fmt: skip
