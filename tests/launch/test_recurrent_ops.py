"""Operators of recurrent layers in a CUDA graph: a replay follows lengths, rows and trees of the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from unittest.mock import patch

import pytest
import torch
from oracles.recurrent_batches import GATES, Trees, int32, make_layer

from specdec_kernels import OPS, UnsupportedError, simulated_gpu, state_commit, tree_conv, use_backend, window_commit
from specdec_kernels.dispatch import torch_ops
from specdec_kernels.dispatch.torch_ops import LAUNCHES
from specdec_kernels.graph_capture import capture
from specdec_kernels.testing.agreement import make_sample, tensors_in
from specdec_kernels.testing.samples_attention import Sizes

pytestmark = pytest.mark.aot
DEVICE = torch.device("cuda:0")
EARLIER = Trees([4, 0, 3], [-1, 0, 1, 2, -1, 0, 0], [5, 5, 0], [2, 0, 1], 1)
LATER = Trees([0, 5, 3], [-1, 0, 0, 1, 1, -1, -1, 1], [0, 9, 5], [1, 3, 0], 0)
"""Other counts, parents, lengths and rows of the same shapes."""


def where(trees: Trees) -> tuple[torch.Tensor, ...]:
    return (*trees.tensors, int32([*trees.parents, *[0] * trees.tail]))


@contextmanager
def reading(**where: torch.Tensor) -> Iterator[list[str]]:
    """Checks that launches read these tensors themselves: a copy made at capture would keep the numbers of then.

    The results of simulated launches cannot show it, as the CPU backend computes them from the operator's arguments.
    """
    from triton.runtime.jit import JITFunction

    launched, run = [], JITFunction.run

    def watched(self: Any, *args: Any, **options: Any) -> Any:
        given = dict(zip(self.arg_names, args)) | options
        launched.append(self.fn.__name__)
        for name in where.keys() & {each.removesuffix("_ptr") for each in self.arg_names}:
            assert given[f"{name}_ptr"].data_ptr() == where[name].data_ptr(), (self.fn.__name__, name)
        return run(self, *args, **options)

    with patch.object(JITFunction, "run", watched):
        yield launched


TREES = ("rows", "lengths", "offsets", "parents")


@pytest.mark.parametrize("form", ["triton", "triton_sequence"])
@pytest.mark.parametrize(("op", "gate"), [("tree_delta", "head"), *(("tree_ssm", gate) for gate in GATES)])
def test_a_replay_follows_trees_of_the_device(gpu: simulated_gpu.Gpu, op: str, gate: str, form: str) -> None:
    layer = make_layer(1, EARLIER, gate, op == "tree_delta", 2, 1, 16, 16)
    state = layer.state.nan_to_num(0)
    parts = (layer.query, layer.key, layer.value, layer.gate, *((layer.beta,) if layer.beta is not None else ()))
    options = {} if layer.decay is None else {"decay": layer.decay.to(DEVICE)}
    given = [each.to(DEVICE) for each in (*parts, state)]
    trees = [each.to(DEVICE) for each in where(EARLIER)]
    found: list[Any] = []

    def program() -> None:
        with use_backend(**{op: form}):
            found[:] = [OPS[op](*given, *trees, **options)]

    with reading(**dict(zip(TREES, trees, strict=True))) as launched:
        replay = capture(program, DEVICE)
    assert launched
    for held, new in zip(trees, where(LATER), strict=True):
        held.copy_(new)
    gpu.clear()
    replay()
    assert gpu.host_reads == []
    got = found[0][0] if op == "tree_delta" else found[0]
    more = {} if layer.decay is None else {"decay": layer.decay}
    want = OPS[op](*parts, state, *where(LATER), **more)
    assert torch.equal(got.cpu(), want[0] if op == "tree_delta" else want)


def test_a_replay_follows_windows_and_paths_of_the_device(gpu: simulated_gpu.Gpu) -> None:
    inputs, weight, window = torch.randn(8, 6), torch.randn(6, 4), torch.randn(4, 3, 6)
    paths = int32([0, 1, -1, -1, 4, 6]).view(3, 2), int32([-1, -1, 0, 2, 5, -1]).view(3, 2)
    given = [each.to(DEVICE) for each in (inputs, weight, window)]
    trees, path = [each.to(DEVICE) for each in where(EARLIER)], paths[0].to(DEVICE)
    found: list[Any] = []

    def program() -> None:
        found[:] = [tree_conv(given[0], given[1], None, given[2], *trees)]
        window_commit(given[2], given[0], *trees[:2], path)

    with reading(**dict(zip(TREES, trees, strict=True)), path=path) as launched:
        replay = capture(program, DEVICE)
    assert {"convolve", "move_windows"} <= {*launched}
    for held, new in zip((*trees, path, given[2]), (*where(LATER), paths[1], window), strict=True):
        held.copy_(new)
    gpu.clear()
    replay()
    assert gpu.host_reads == []
    want = tree_conv(inputs, weight, None, window, *where(LATER))
    window_commit(window, inputs, *where(LATER)[:2], paths[1])
    assert torch.equal(found[0].cpu(), want) and torch.equal(given[2].cpu(), window)


def test_a_replay_follows_rows_and_paths_of_states(gpu: simulated_gpu.Gpu) -> None:
    layer = make_layer(1, EARLIER, "head", False, 2, 1, 16, 16)
    state, parts = layer.state.nan_to_num(0), (layer.key, layer.value, layer.gate)
    paths = int32([0, 1, -1, -1, 4, 6]).view(3, 2), int32([-1, -1, 0, 2, 5, -1]).view(3, 2)
    given = [each.to(DEVICE) for each in (state, *parts)]
    rows, lengths, path = (each.to(DEVICE) for each in (*where(EARLIER)[:2], paths[0]))
    with reading(rows=rows, lengths=lengths, path=path) as launched:
        replay = capture(lambda: state_commit(*given, rows, lengths, path), DEVICE)
    assert {*launched} == {"replay_path"}
    for held, new in zip((rows, lengths, path, given[0]), (*where(LATER)[:2], paths[1], state), strict=True):
        held.copy_(new)
    gpu.clear()
    replay()
    assert gpu.host_reads == []
    state_commit(state, *parts, *where(LATER)[:2], paths[1])
    assert torch.equal(given[0].cpu(), state)


@pytest.mark.parametrize("op", ["tree_delta", "tree_ssm", "tree_conv", "state_commit"])
def test_a_copy_at_capture_is_found(gpu: simulated_gpu.Gpu, monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    """Launches that copy their integers first give right results here, but read other memory."""
    module = import_module(f"specdec_kernels.ops.{op}.launch")

    def copies(*parts: Any) -> tuple[Any, ...]:
        return tuple(each if each is None else each.clone() for each in parts)

    monkeypatch.setattr(module, "in_one_piece", copies)
    with pytest.raises(AssertionError, match=r"'(rows|lengths|offsets|parents|path)'"):
        if op == "tree_conv":
            test_a_replay_follows_windows_and_paths_of_the_device(gpu)
        elif op == "state_commit":
            test_a_replay_follows_rows_and_paths_of_states(gpu)
        else:
            test_a_replay_follows_trees_of_the_device(gpu, op, "head", "triton")


@pytest.mark.parametrize(("op", "gate"), [("tree_delta", "channel"), ("tree_ssm", "head"), ("tree_ssm", "element")])
def test_the_form_follows_from_shapes(gpu: simulated_gpu.Gpu, op: str, gate: str) -> None:
    """A triangular system serves drafts; without drafts, and with gates of elements, nodes follow one another."""
    for counts, form in (([1, 1], "follow_nodes"), ([2, 1], "follow_nodes" if gate == "element" else "solve_nodes")):
        trees = Trees(counts, [-1, *range(-1, 1)][: sum(counts)], [5, 5], [0, 1], 0)
        layer = make_layer(1, trees, gate, op == "tree_delta", 2, 1, 16, 16)
        parts = (layer.query, layer.key, layer.value, layer.gate, *((layer.beta,) if layer.beta is not None else ()))
        given = [each.to(DEVICE) for each in (*parts, layer.state, *trees.tensors)]
        options = {} if layer.decay is None else {"decay": layer.decay.to(DEVICE)}
        gpu.clear()
        OPS[op](*given, **options)
        assert [each.kernel for each in gpu.launches] == [f"{op}.triton_kernel:{form}"]


MISFITS: dict[str, tuple[str, Any]] = {
    "tree_conv of two dtypes": ("tree_conv", {3: lambda window: window.bfloat16()}),
    "tree_conv in float64": ("tree_conv", dict.fromkeys((0, 1, 2, 3), torch.Tensor.double)),
    "tree_delta in float64": ("tree_delta", dict.fromkeys(range(6), torch.Tensor.double)),
    "tree_ssm in float64": ("tree_ssm", dict.fromkeys(range(5), torch.Tensor.double)),
    "state_commit in float64": ("state_commit", dict.fromkeys(range(4), torch.Tensor.double)),
    **{
        f"{op} of many channels": (op, {at: lambda part: torch.cat([part] * 40, dim=2)[:, :, :513] for at in places})
        for op, places in (("tree_delta", (0, 1, 5)), ("tree_ssm", (0, 1, 4)), ("state_commit", (0, 1)))
    },
}
"""Operators, and changes of arguments by position with which their kernels cannot serve a call."""


def changed(case: str, device: str) -> tuple[str, Any]:
    name, changes = MISFITS[case]
    call = make_sample(name, Sizes(rows=2, nodes=3, heads=2, kv_heads=1, width=16), device=torch.device("cpu"))
    given = [changes.get(at, lambda same: same)(each) for at, each in enumerate(call.arguments)]
    return name, [each.to(device) if isinstance(each, torch.Tensor) else each for each in given]


@pytest.mark.parametrize("case", MISFITS)
def test_the_dispatcher_leaves_misfits_to_the_reference(gpu: simulated_gpu.Gpu, case: str) -> None:
    """Compiled code and torch.ops.specdec refuse what the operators refuse: no launch, and the same results."""
    name, given = changed(case, "cuda:0")
    _, expected = changed(case, "cpu")
    gpu.clear()
    found, want = LAUNCHES[name](*given), OPS[name].reference(*expected)
    assert gpu.launches == []
    for one, other in zip((*tensors_in(found), *given), (*tensors_in(want), *expected), strict=True):
        assert not isinstance(one, torch.Tensor) or torch.equal(one.cpu(), other)


def test_misfits_in_a_capture_are_refused_with_the_reason(
    gpu: simulated_gpu.Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_ops, "is_capturing", lambda: True)
    name, given = changed("tree_delta of many channels", "cuda:0")
    reason = "tree_delta: state has 513 key channels; .*; its reference cannot be captured; call it outside"
    with pytest.raises(UnsupportedError, match=reason):
        LAUNCHES[name](*given)


@pytest.mark.parametrize("form", ["triton", "triton_sequence"])
@pytest.mark.parametrize("op", ["tree_delta", "tree_ssm"])
def test_rocm_is_left_to_the_reference(
    gpu: simulated_gpu.Gpu, monkeypatch: pytest.MonkeyPatch, op: str, form: str
) -> None:
    call = make_sample(op, Sizes(rows=2, nodes=3, heads=2, kv_heads=1, width=16), device=DEVICE)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    reasons = {row.backend: str(row.reason) for row in OPS[op].explain(*call.arguments, **call.options)}
    assert reasons[form].startswith("torch is built for ROCm 7.0; these kernels need products in tf32x3")
    assert OPS[op].choose_backend(*call.arguments, **call.options) == "reference"
