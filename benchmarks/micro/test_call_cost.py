r"""What a call of an operator costs in Python: around the registered C++ kernel, and in a Triton launch.

    python -m pytest -s benchmarks/micro/test_call_cost.py
    python -m benchmarks.harness.run_and_record benchmarks/micro/test_call_cost.py \
        --out benchmarks/results/call_cost_cpu.json

Small calls are timed through the operator and straight through torch.ops.specdec with the same arguments, in processor
time; the difference is ours. It is printed and recorded; an operator of the step path may cost 10 microseconds. Those
of Triton are called with kernels that do nothing (and so without Triton's own launcher), on tensors of the CPU
whose values nobody looks at: checks, scratch and small tensor operations, which a step that is not captured pays.
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

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from oracles.recorded_calls import calls_of

from specdec_kernels import OPS, use_backend
from specdec_kernels.dispatch import argument_checks, extension
from specdec_kernels.dispatch.torch_ops import _find_launch
from specdec_kernels.testing.agreement import make_sample
from specdec_kernels.testing.samples_attention import Sizes
from specdec_kernels.triton_shared import triton_backend

STEP_PATH = (
    "tree_plan", "kv_slots", "kv_stage", "tree_attention", "distribution_stats", "replay_sample", "exact_match_verify",
    "replay_verify", "rejection_verify", "rejection_verify_logits", "recursive_rejection_verify", "traversal_verify",
    "draft_sample",
    "process_logits", "kv_commit",
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


@pytest.mark.skipif(extension.unavailable_reason() is not None, reason=str(extension.unavailable_reason()))
@pytest.mark.parametrize("name", STEP_PATH)
def test_python_around_a_kernel(name: str, benchmark: Any) -> None:
    torch.set_num_threads(1)
    call, op, registered = make_sample(name, SMALL), OPS[name], REGISTERED.get(name, name)

    def ours() -> Any:
        return op(*call.arguments, **call.options)

    with use_backend(), torch.inference_mode():
        operator = getattr(torch.ops.specdec, registered).default
        arguments = calls_of(registered, ours)[-1]
        whole, kernel = microseconds([ours, lambda: operator(*arguments)])
        benchmark.pedantic(ours, rounds=5, iterations=100)
    found = {"call_us": whole, "kernel_us": kernel, "python_us": whole - kernel}
    benchmark.extra_info.update({of: round(value, 2) for of, value in found.items()})
    print("".join(f"  {of} {value:.1f}" for of, value in found.items()))
    assert whole - kernel < MOST


LAUNCHES = {"rejection_verify_logits": "rejection_verify:rejection_verify_logits"}
UNFIT = "replay_verify", "rejection_verify_logits"
"""Whose launches follow, on the host, what their kernels leave: made of others that are here."""


@pytest.mark.skipif(triton_backend.importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("name", [each for each in STEP_PATH if each not in UNFIT])
def test_python_of_a_launch(name: str, benchmark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.jit import JITFunction

    torch.set_num_threads(1)
    monkeypatch.setattr(JITFunction, "__getitem__", lambda self, grid: lambda *args, **kwargs: None)
    monkeypatch.setattr(argument_checks, "can_read_values", lambda value: False)
    call, launch = make_sample(name, SMALL), _find_launch(LAUNCHES.get(name, name))

    def ours() -> Any:
        return launch(*call.arguments, **call.options)

    with torch.inference_mode():
        (whole,) = microseconds([ours])
        benchmark.pedantic(ours, rounds=5, iterations=100)
    benchmark.extra_info.update({"launch_us": round(whole, 2)})
    print(f"  launch_us {whole:.1f}")
