"""Planted faults that only a launch can show: the launch suite detects each of them."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import models
from oracles.simulated_gpu_engines import engine

from specdec_fast import SamplingParams
from specdec_fast.engine.cuda_graph.step_program import StepProgram
from specdec_kernels import OPS, simulated_gpu
from specdec_kernels.simulated_gpu import LaunchError
from specdec_kernels.testing.agreement import make_sample
from specdec_kernels.testing.samples_attention import Sizes

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

SIZES = Sizes(rows=2, nodes=3, vocab=1000)
NOT_ITSELF = tl.constexpr(float("nan"))


def planted(out, value, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(out + tl.arange(0, SIZE), value)


def with_nan(out, value, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(out + tl.arange(0, SIZE), value + NOT_ITSELF)


def launch(kernel: Any, grid: Any = (1,), out: torch.Tensor | None = None, value: Any = 3, **options: Any) -> None:
    """A launch of a small kernel on the current device."""
    place = torch.empty(64, dtype=torch.int32, device=f"cuda:{torch.cuda.current_device()}") if out is None else out
    kernel[grid](place, value, SIZE=64, **options)


def test_a_sound_kernel_launches(gpu: simulated_gpu.Gpu) -> None:
    launch(triton.jit(planted))
    (found,) = gpu.launches
    assert found.kernel.endswith(":planted") and found.grid == (1,) and found.compiled and found.device == 0


def test_a_nan_among_the_globals_of_a_kernel_is_seen(gpu: simulated_gpu.Gpu) -> None:
    with pytest.raises(RuntimeError, match="NOT_ITSELF has changed since we compiled this kernel"):
        launch(triton.jit(with_nan), value=3.0, out=torch.empty(64, device="cuda"))


@pytest.mark.parametrize("grid", [(-1,), (0,), (1, 70_000), (1, 1, 1, 1), (2.0,), (2**31,)])
def test_an_illegal_grid_is_seen(gpu: simulated_gpu.Gpu, grid: tuple[Any, ...]) -> None:
    with pytest.raises(LaunchError, match="grid"):
        launch(triton.jit(planted), grid)


def test_more_threads_than_a_block_has_are_seen(gpu: simulated_gpu.Gpu) -> None:
    with pytest.raises(LaunchError, match="at most 1024 threads"):
        launch(triton.jit(planted), num_warps=64)


def test_tensors_of_the_cpu_and_of_another_device_are_seen(gpu: simulated_gpu.Gpu) -> None:
    with pytest.raises(LaunchError, match="out is on the CPU"):
        launch(triton.jit(planted), out=torch.empty(64, dtype=torch.int32))
    with pytest.raises(LaunchError, match="out is on cuda:1; the launch goes to cuda:0"):
        launch(triton.jit(planted), out=torch.empty(64, dtype=torch.int32, device="cuda:1"))


@pytest.mark.parametrize(("value", "compiles"), [(4, 0), (16, 1), (1, 1), (2**40, 1), (2.5, 1)])
def test_a_new_specialisation_is_seen(gpu: simulated_gpu.Gpu, value: Any, compiles: int) -> None:
    kernel = triton.jit(planted)
    launch(kernel, value=3)
    gpu.clear()
    launch(kernel, value=value)
    assert len(gpu.compiled) == compiles


def test_unaligned_memory_is_a_new_specialisation(gpu: simulated_gpu.Gpu) -> None:
    kernel, room = triton.jit(planted), torch.empty(128, dtype=torch.int32, device="cuda")
    launch(kernel, out=room[:64])
    launch(kernel, out=room[4:68])
    assert len(gpu.compiled) == 1
    launch(kernel, out=room[1:65])
    assert len(gpu.compiled) == 2


def test_an_operator_that_asks_its_tensors_is_seen(gpu: simulated_gpu.Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read of the host in a launch is on record with its place."""
    module = import_module("specdec_kernels.ops.tree_plan.launch")
    sound = module.result_tensors

    def asks(op: str, out: Any, specs: Any, device: torch.device) -> Any:
        found = sound(op, out, specs, device)
        assert int(found[0][0]) is not None
        return found

    call = make_sample("tree_plan", SIZES, "cuda")
    monkeypatch.setattr(module, "result_tensors", asks)
    gpu.clear()
    OPS["tree_plan"](*call.arguments)
    (read,) = gpu.host_reads
    assert read.operator == "__int__" and "test_faults.py" in read.place


def test_a_captured_step_that_asks_the_device_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is not captured, the reason names the read, and the text is correct."""
    sound = StepProgram.__call__
    want = _text(engine("none", "cpu", tmp_path, "sync"))

    def asks(self: StepProgram) -> None:
        assert self.live.sum().item() >= 0
        sound(self)

    monkeypatch.setattr(StepProgram, "__call__", asks)
    with simulated_gpu.gpu("sm_90") as gpu:
        made = engine("none", "cuda", tmp_path)
        assert _text(made) == want
        assert made.step_mode == "sync" and "item" in made.explain()
        assert gpu.captures == []


def _text(made: Any) -> list[int]:
    return made.generate([models.prompt(5)], SamplingParams(seed=1, temperature=0.8, max_new_tokens=9))[0].tokens
