"""What a call of an operator costs in Python, around the registered kernel: `Op`, its adapter and the dispatcher.

    python -m pytest -s benchmarks/test_call_cost.py

Small calls are timed through the operator and straight through torch.ops.specdec with the same arguments; the
difference is ours. The table is printed; an operator of the step path may cost 10 microseconds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from oracles.recorded_calls import calls_of

from specdec_kernels import OPS, extension, use_backend
from specdec_kernels.agreement import sample
from specdec_kernels.samples import Sizes

STEP_PATH = (
    "tree_plan", "kv_slots", "kv_stage", "tree_attention", "law_stats", "replay_sample", "tree_verify",
    "replay_verify", "chain_verify", "chain_verify_logits", "ordered_verify", "traversal_verify", "draw_sample",
    "edit_logits", "kv_commit",
)  # fmt: skip
REGISTERED = {"kv_commit": "kv_commit_table"}
SMALL = Sizes(rows=1, nodes=2, vocab=32, length=4, heads=1, kv_heads=1, width=8, layers=1)
MOST = 10.0


def microseconds(calls: list[Callable[[], Any]], rounds: int = 15, count: int = 300) -> list[float]:
    """Median processor time per call of each, taking turns."""
    taken: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for times, call in zip(taken, calls):
            start = time.process_time()
            for _ in range(count):
                call()
            times.append((time.process_time() - start) / count * 1e6)
    return [median(times) for times in taken]


@pytest.mark.skipif(extension.missing() is not None, reason=str(extension.missing()))
def test_python_around_a_kernel_costs_little() -> None:
    torch.set_num_threads(1)
    rows = []
    with use_backend(), torch.inference_mode():
        for name in STEP_PATH:
            call = sample(name, SMALL)
            registered = REGISTERED.get(name, name)

            def ours(op: Any = OPS[name], call: Any = call) -> Any:
                return op(*call.arguments, **call.options)

            operator = getattr(torch.ops.specdec, registered).default
            arguments = calls_of(registered, ours)[-1]
            whole, kernel = microseconds([ours, lambda o=operator, a=arguments: o(*a)])
            rows.append((name, whole, kernel, whole - kernel))
    print("\noperator              call us   kernel us   Python around it us")
    for name, *times in rows:
        print(f"{name:<20}" + "".join(f"{each:>10.1f}" for each in times))
    assert max(around for *_, around in rows) < MOST
