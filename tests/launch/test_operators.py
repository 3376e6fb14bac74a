"""Every operator with a Triton backend on a simulated GPU: all samples, options, vocabularies and row counts."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec_kernels import OPS, simulated_gpu, tree_plan, use_backend
from specdec_kernels.ops.tree_plan import MOST_ROWS
from specdec_kernels.testing.agreement import SAMPLES, cases, difference, make_sample, tensors_in
from specdec_kernels.testing.samples_attention import Call, Sizes

FULL = os.environ.get("SPECDEC_KERNELS_FULL") == "1"
TRITON = sorted(name for name in SAMPLES if any(backend.name == "triton" for backend in OPS[name].backends))
CASES = [(op, case) for op in TRITON for case in cases(op)]
DIRECT = [op for op in TRITON if OPS[op]._direct_backends is not None]
OVER_VOCABULARY = [(op, case) for op, case in CASES if "vocab" in SAMPLES[op].names]
INSPECTION = {"recursive_rejection_thresholds", "traversal_thresholds"}
"""Operators that ask the device how deep trees are, because nothing but tests and tools calls them."""
RECORDED = Path(__file__).with_name("launches_per_call.json")
"""Kernels that each sample call launches, whatever its dtype; `SPECDEC_RECORD=1` in one process writes it anew."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SMALL = Sizes(rows=3, nodes=5, length=33, heads=4, kv_heads=2, width=64, vocab=3000)


def launched(gpu: simulated_gpu.Gpu, op: str, call: Call, **options: Any) -> Any:
    """Runs a call, served by Triton, and returns its result. Nothing may wait for the device."""
    gpu.clear()
    found = OPS[op](*call.arguments, **call.options, **options)
    assert OPS[op].last_backend == "triton", OPS[op].explain(*call.arguments, **call.options)
    assert gpu.launches
    assert gpu.uploads == []
    assert gpu.host_reads == [] or op in INSPECTION
    return found


def on_gpu(op: str, sizes: Sizes, case: str = "") -> Call:
    """A sample on the second GPU, while the first is the current one."""
    return make_sample(op, sizes, "cuda:1", case)


@pytest.mark.parametrize(("op", "case"), CASES)
def test_every_sample_launches(gpu: simulated_gpu.Gpu, op: str, case: str) -> None:
    dtypes, counts = DTYPES if "dtype" in SAMPLES[op].names else DTYPES[:1], set()
    for dtype in dtypes if FULL or case == "" else dtypes[:2]:
        launched(gpu, op, on_gpu(op, replace(SMALL, dtype=dtype), case))
        counts.add(len(gpu.launches))
    (count,), name = counts, f"{op} {case}".strip()
    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    if os.environ.get("SPECDEC_RECORD") == "1":
        RECORDED.write_text(json.dumps(dict(sorted({**recorded, name: count}.items())), indent=1) + "\n")
        return
    assert count == recorded[name], "a call launches another number of kernels; SPECDEC_RECORD=1 records fewer"


def test_every_call_is_recorded_and_nothing_else() -> None:
    assert set(json.loads(RECORDED.read_text())) == {f"{op} {case}".strip() for op, case in CASES}


@pytest.mark.parametrize("vocab", [151_669, 50_257])
@pytest.mark.parametrize(("op", "case"), OVER_VOCABULARY)
def test_vocabularies_that_16_does_not_divide_launch(gpu: simulated_gpu.Gpu, op: str, case: str, vocab: int) -> None:
    launched(gpu, op, on_gpu(op, replace(SMALL, vocab=vocab, rows=2, nodes=3, dtype=torch.bfloat16), case))


@pytest.mark.parametrize("op", [op for op in TRITON if "thresholds" not in op])
def test_any_number_of_rows_launches_the_same_kernels(gpu: simulated_gpu.Gpu, op: str) -> None:
    """After one small and one large batch nothing is compiled for any batch."""
    shape = replace(SMALL, dtype=torch.bfloat16 if torch.bfloat16 in SAMPLES[op].dtypes else torch.float32, vocab=1000)
    nodes = (4, 5) if "nodes" in SAMPLES[op].names else (4,)
    for rows in (2, 64):
        launched(gpu, op, on_gpu(op, replace(shape, rows=rows, nodes=4)))
    kernels: dict[tuple[int, int], list[str]] = {}
    for count, each in product((*range(1, 10), 64), nodes):
        launched(gpu, op, on_gpu(op, replace(shape, rows=count, nodes=each)))
        if gpu.compiled:
            kernels[count, each] = gpu.compiled
    assert kernels == {}


@pytest.mark.parametrize("op", DIRECT)
def test_with_memory_of_the_caller_nothing_is_allocated(gpu: simulated_gpu.Gpu, op: str) -> None:
    call, again = (on_gpu(op, replace(SMALL, vocab=50_257)) for _ in range(2))
    want = list(tensors_in(OPS[op](*call.arguments, **call.options)))
    out = want[0].clone() if len(want) == 1 else tuple(map(torch.empty_like, want))
    size = OPS[op].workspace_size(*again.arguments, **again.options)
    workspace = torch.empty(size, dtype=torch.uint8, device="cuda:1")
    found = launched(gpu, op, again, out=out, workspace=workspace)
    if op != "rejection_verify_logits":
        assert gpu.allocations == 0
    for got, expected in zip(tensors_in(found), want, strict=True):
        assert difference(got, expected, 0.0)[1] is None


@pytest.mark.parametrize("architecture", ["sm_80", "sm_100"])
@pytest.mark.parametrize("op", TRITON)
def test_other_architectures_launch(architecture: str, op: str) -> None:
    """One call of each operator; all options with SPECDEC_KERNELS_FULL=1 (`make kernels-full`)."""
    dtype = torch.bfloat16 if torch.bfloat16 in SAMPLES[op].dtypes else torch.float32
    with simulated_gpu.gpu(architecture, devices=2) as gpu:
        for case in cases(op) if FULL else ("",):
            launched(gpu, op, on_gpu(op, replace(SMALL, dtype=dtype), case))


@pytest.mark.parametrize("case", ["", "gates of channels", "prompt"])
@pytest.mark.parametrize("op", ["tree_delta", "tree_ssm"])
def test_recurrences_launch_node_after_node_on_request(gpu: simulated_gpu.Gpu, op: str, case: str) -> None:
    """The other form of a recurrence: one launch, and results of the same shapes."""
    call = on_gpu(op, SMALL, case)
    gpu.clear()
    with use_backend(**{op: "triton_sequence"}):
        found = OPS[op](*call.arguments, **call.options)
    assert [launch.kernel for launch in gpu.launches] == [f"{op}.triton_kernel:follow_nodes"]
    assert OPS[op].last_backend == "triton_sequence" and gpu.host_reads == gpu.uploads == []
    assert next(tensors_in(found)).shape == call.arguments[2].shape


def test_the_dispatcher_reaches_the_same_launches(gpu: simulated_gpu.Gpu) -> None:
    """torch.ops.specdec.* on tensors of a GPU, as compiled programs call it."""
    served: list[str] = []
    runs: dict[str, Callable[[Call], Any]] = {
        "kv_slots": lambda call: torch.ops.specdec.kv_slots(*call.arguments),
        "kv_stage": lambda call: torch.ops.specdec.kv_stage(*call.arguments),
        "replay_sample": lambda call: torch.ops.specdec.replay_sample(*call.arguments, None),
    }
    for op, run in runs.items():
        call, want = on_gpu(op, SMALL), on_gpu(op, SMALL)
        with use_backend("triton"):
            expected = [*tensors_in(OPS[op](*want.arguments, **want.options)), *want.writes]
        gpu.clear()
        got = [*tensors_in(run(call)), *call.writes]
        served += [launch.kernel.partition(".")[0] for launch in gpu.launches]
        for one, other in zip(got, expected, strict=True):
            assert difference(one, other, 0.0)[1] is None
    assert set(served) == set(runs)


@pytest.mark.parametrize("rows", [256, MOST_ROWS])
def test_as_many_rows_as_a_plan_takes_launch(gpu: simulated_gpu.Gpu, rows: int) -> None:
    """Trees of one node each: a program compares its nodes with all rows, tile by tile."""
    parents = torch.full((rows,), -1, dtype=torch.int32, device="cuda")
    offsets = torch.arange(rows + 1, dtype=torch.int32, device="cuda")
    made = tree_plan(parents, offsets, 1)
    assert gpu.launches and made.row.tolist() == list(range(rows))


def test_large_batches_share_a_kernel_of_tree_plan(gpu: simulated_gpu.Gpu) -> None:
    """A tile that grows with the rows takes compilers minutes at some thousand rows."""
    for rows in (512, 4096, 20_000):
        parents = torch.full((rows,), -1, dtype=torch.int32, device="cuda")
        tree_plan(parents, torch.arange(rows + 1, dtype=torch.int32, device="cuda"), 1)
    assert len(gpu.launches) == 3 and not any(launch.compiled for launch in gpu.launches[1:])
