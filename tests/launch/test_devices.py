"""Launches run on the GPU of their tensors and on its current stream, on every way to call them.

Tensors lie on cuda:1, whose current stream is not its default one, while cuda:0 is the current device.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles.recorded_calls import calls_of

from specdec_kernels import OPS, simulated_gpu, use_backend
from specdec_kernels.dispatch import extension
from specdec_kernels.dispatch.torch_ops import LAUNCHES
from specdec_kernels.ops.kv_commit import CacheTable
from specdec_kernels.ops.process_logits import NodePaths
from specdec_kernels.ops.tree_attention import plan_for
from specdec_kernels.testing.agreement import cases, make_sample
from specdec_kernels.testing.samples_attention import Sizes

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(simulated_gpu.unavailable_reason() is not None, reason=str(simulated_gpu.unavailable_reason())),
    pytest.mark.filterwarnings("ignore::specdec_kernels.FallbackWarning"),  # results are computed on the CPU
]
OPERATORS = Path(simulated_gpu.__file__).parents[1] / "ops"
SMALL = Sizes(rows=2, nodes=3, vocab=64, length=20, heads=2, kv_heads=1, width=16, layers=2)
HERE = torch.device("cuda:1")
BY_TRITON = sorted(name for name, op in OPS.items() if "triton" in [backend.name for backend in op.backends])


@contextmanager
def two_gpus() -> Iterator[simulated_gpu.Gpu]:
    """The first is the current one, the second works on a stream of its own."""
    with simulated_gpu.gpu("sm_90", devices=2) as made, torch.inference_mode():
        torch.cuda.set_stream(torch.cuda.Stream(HERE))
        torch.cuda.set_device(0)
        yield made


@pytest.fixture
def gpu() -> Iterator[simulated_gpu.Gpu]:
    with two_gpus() as made:
        yield made


def check(gpu: simulated_gpu.Gpu, call: Callable[[], Any]) -> Any:
    """Makes a call and looks where its launches went."""
    gpu.clear()
    found = call()
    stream = torch.cuda.current_stream(HERE).cuda_stream
    assert stream != torch.cuda.default_stream(HERE).cuda_stream
    assert gpu.launches and {(each.device, each.stream) for each in gpu.launches} == {(1, stream)}
    assert torch.cuda.current_device() == 0, "what was current before"
    return found


@pytest.mark.parametrize("name", BY_TRITON)
def test_operators_launch_on_the_gpu_of_their_tensors(gpu: simulated_gpu.Gpu, name: str) -> None:
    for case in cases(name):
        call = make_sample(name, SMALL, device=HERE, case=case)
        with use_backend("triton"):
            check(gpu, lambda call=call: OPS[name](*call.arguments, **call.options))


def launch_of(name: str) -> Callable[..., Any]:
    """The function of a `launch.py` that serves an operator."""
    for path in (
        *OPERATORS.glob(f"{name}/launch.py"),
        *OPERATORS.glob("*/launch.py"),
        *OPERATORS.glob("*/stream_k.py"),
    ):
        module = import_module(".".join(("specdec_kernels.ops", *path.relative_to(OPERATORS).with_suffix("").parts)))
        if hasattr(module, name):
            found: Callable[..., Any] = getattr(module, name)
            return found
    raise AssertionError(f"{name}: no launch")


@pytest.mark.parametrize("name", BY_TRITON)
def test_launches_without_an_operator_run_there_too(gpu: simulated_gpu.Gpu, name: str) -> None:
    call = make_sample(name, SMALL, device=HERE)
    check(gpu, lambda: launch_of(name)(*call.arguments, **call.options))


UNREGISTERED = {"attention_plan", "process_logits_overlay", "kv_commit_scratch"}
"""Operators without a schema."""


@pytest.mark.skipif(extension.unavailable_reason() is not None, reason=str(extension.unavailable_reason()))
@pytest.mark.parametrize("name", [name for name in BY_TRITON if name not in UNREGISTERED])
def test_launches_of_the_dispatcher_run_there_too(name: str) -> None:
    call = make_sample(name, SMALL)
    if name == "kv_commit":  # with a list of caches; a table's addresses say nothing of another device
        call = replace(call, arguments=(list(call.arguments[0]), *call.arguments[1:]))
    with use_backend("cpu"), torch.inference_mode():
        (*_, arguments) = calls_of(name, lambda: OPS[name](*call.arguments, **call.options))
    with two_gpus() as gpu:
        there = [on_gpu(each) for each in arguments]
        check(gpu, lambda: LAUNCHES[name](*there))


def on_gpu(value: Any) -> Any:
    """Tensors, also those of lists, on the GPU."""
    if isinstance(value, torch.Tensor):
        return value.to(HERE)
    return [on_gpu(each) for each in value] if isinstance(value, (list, tuple)) else value


def test_plans_and_attention_with_a_plan(gpu: simulated_gpu.Gpu) -> None:
    call = make_sample("tree_attention", SMALL, device=HERE)
    query, key_cache, _, page_table, lengths, offsets, *rest = call.arguments
    plan = check(gpu, lambda: plan_for(query, key_cache, page_table, lengths, offsets, rest[0]))
    assert plan is not None and plan.starts.device == HERE
    check(gpu, lambda: OPS["tree_attention"](*call.arguments, **call.options, plan=plan))


def test_tensors_in_dataclasses_and_tables_determine_the_device(gpu: simulated_gpu.Gpu) -> None:
    """Arguments that are not tensors themselves: paths, processors, growth, overlays, tables."""
    for name in ("process_logits_overlay", "process_logits", "tree_grow", "kv_commit", "kv_commit_scratch"):
        call = make_sample(name, SMALL, device=HERE)
        held = [each for each in call.arguments if is_dataclass(each) or isinstance(each, CacheTable)]
        assert held, name
        for each in held:
            tensors = each if isinstance(each, CacheTable) else [getattr(each, field.name) for field in fields(each)]
            assert {tensor.device for tensor in tensors if isinstance(tensor, torch.Tensor)} == {HERE}
        check(gpu, lambda name=name, call=call: OPS[name](*call.arguments, **call.options))
    assert isinstance(make_sample("process_logits", SMALL).arguments[1], NodePaths)


def test_measurements(gpu: simulated_gpu.Gpu) -> None:
    """Graphs that are timed are captured on the device of their calls."""
    from specdec_kernels.inspection.timing import seconds_of

    call = make_sample("tree_plan", SMALL, device=HERE)
    gpu.clear()
    assert seconds_of(HERE, [lambda: OPS["tree_plan"](*call.arguments)], rounds=2).median > 0
    assert gpu.launches and {each.device for each in gpu.launches} == {1} and torch.cuda.current_device() == 0


def test_an_error_in_a_launch_leaves_the_current_device(gpu: simulated_gpu.Gpu) -> None:
    from specdec_kernels.ops.tree_plan.triton_kernel import plan_trees

    call = make_sample("tree_plan", SMALL, device=HERE)
    with pytest.raises(TypeError):
        plan_trees[(1,)](*call.arguments)  # more arguments are missing
    assert torch.cuda.current_device() == 0


def test_a_kernel_without_the_guard_is_caught(gpu: simulated_gpu.Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    from specdec_kernels.triton_shared.device_guard import DeviceKernel

    call = make_sample("tree_plan", SMALL, device=HERE)
    with monkeypatch.context() as patch:
        patch.delattr(DeviceKernel, "run")
        with pytest.raises(simulated_gpu.LaunchError, match=r"is on cuda:1; the launch goes to cuda:0"):
            OPS["tree_plan"](*call.arguments)
    check(gpu, lambda: OPS["tree_plan"](*call.arguments))


def launched(path: Path) -> Iterator[tuple[str, str]]:
    """Module and name of what a module imports and writes as `name[grid](...)`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level and node.module]
    package = ("specdec_kernels", "ops", *path.relative_to(OPERATORS).parent.parts)
    of = {a.asname or a.name: (".".join((*package[: len(package) + 1 - node.level], str(node.module))), a.name)
          for node in imports for a in node.names}  # fmt: skip
    subscripts = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for each in subscripts:
        if isinstance(each, ast.Subscript) and isinstance(each.value, ast.Name) and each.value.id in of:
            yield of[each.value.id]


def test_every_kernel_that_is_launched_sees_to_its_device() -> None:
    """Kernels that `jit.kernel` did not make would launch on the current device."""
    from triton.runtime.jit import JITFunction

    from specdec_kernels.triton_shared.device_guard import DeviceKernel

    places = {place for path in OPERATORS.rglob("*.py") for place in launched(path)}
    kernels = {place: getattr(import_module(place[0]), place[1]) for place in places}
    kinds = {place: type(kernel) for place, kernel in kernels.items() if isinstance(kernel, JITFunction)}
    assert len(kinds) > 30
    assert {place: kind for place, kind in kinds.items() if kind is not DeviceKernel} == {}
