"""Launches with the caller's memory, and launches of torch.ops.specdec: the same results, and no allocation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracles.recorded_calls import calls_of
from torch.utils._python_dispatch import TorchDispatchMode

from specdec_kernels import OPS, use_backend
from specdec_kernels.dispatch import argument_checks, torch_ops
from specdec_kernels.testing.agreement import TOLERANCE, difference, make_sample, run_sample, tensors_in
from specdec_kernels.testing.samples_attention import Sizes

SIZES = Sizes(vocab=3000, nodes=4)
DIRECT = sorted(name for name, op in OPS.items() if op._direct_backends)
NO_SCRATCH = ("kv_slots", "tree_plan")


class NothingNew(TorchDispatchMode):
    """Raises if a tensor with its own memory is created."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        made = {each.untyped_storage().data_ptr() for each in tensors_in(found) if each.numel()}
        given = [*args, *(kwargs or {}).values()]
        assert made <= {each.untyped_storage().data_ptr() for each in tensors_in(given)}, f"{func} allocates"
        return found


@pytest.mark.parametrize("name", DIRECT)
def test_out_and_workspace_give_the_same_results(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with use_backend("reference"):
        call = make_sample(name, SIZES)
        want = list(tensors_in(OPS[name](*call.arguments, **call.options)))
    with use_backend("triton"):
        size = OPS[name].workspace_size(*call.arguments, **call.options)
        given = {
            "out": want[0].clone() if len(want) == 1 else tuple(map(torch.empty_like, want)),
            "workspace": torch.full((size,), 0xAB, dtype=torch.uint8),
        }
        assert (size == 0) == (name in NO_SCRATCH)
        with NothingNew(), monkeypatch.context() as patched:
            patched.setattr(argument_checks, "can_read_values", lambda value: False)  # on a GPU values are not checked
            found = OPS[name](*call.arguments, **call.options, **given)
        for got, expected, place in zip(tensors_in(found), want, tensors_in(given["out"]), strict=True):
            assert difference(got, expected, TOLERANCE[torch.float32])[1] is None
            assert got.data_ptr() == place.data_ptr()
        if size:
            with pytest.raises(ValueError, match=rf"{name}.*: workspace is .*expected contiguous torch.uint8 \[\d+\]"):
                OPS[name](*call.arguments, **call.options, out=given["out"], workspace=given["workspace"][:-256])
        with pytest.raises(ValueError, match=r": out.*expected"):
            OPS[name](*call.arguments, **call.options, out=[], workspace=given["workspace"])


def test_the_dispatcher_reaches_the_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the launches under the CPU key, torch.ops.specdec.* runs Triton for the arguments of recorded calls.

    Memory that the recorded calls wrote is restored.
    """
    names = sorted({*OPS} & set(torch_ops.LAUNCHES))
    recorded = {}
    for name in names:
        call = make_sample(name, SIZES)
        arguments = (list(call.arguments[0]), *call.arguments[1:]) if name == "kv_commit" else call.arguments
        before = [each.clone() for each in call.writes]
        with use_backend("cpu"):
            (given,) = calls_of(name, lambda n=name, c=call, a=arguments: OPS[n](*a, **c.options))
        for each, old in zip(call.writes, before, strict=True):
            each.copy_(old)
        recorded[name] = given, call.writes
    places: list[str] = []
    find = torch_ops._find_launch

    def launch(place: str) -> Any:
        places.append(place)
        return find(place)

    monkeypatch.setattr(torch_ops, "_find_launch", launch)
    library = torch_ops.register_launches("CPU", override=True)
    try:
        for name in names:
            with use_backend("reference"):
                want = run_sample(name, make_sample(name, SIZES))
            given, writes = recorded[name]
            places.clear()
            got = [*tensors_in(getattr(torch.ops.specdec, name)(*given)), *writes]
            assert got and len(places) == 1 and places[0].endswith(name), (name, places)
            for one, other in zip(got, want[-len(got) :], strict=True):  # written tensors may be returned too
                if name == "tree_plan":  # as many ancestor words as the largest row needs, or more
                    one, other = one[..., : other.shape[-1]], other[..., : one.shape[-1]]
                assert difference(one, other, TOLERANCE[torch.float32])[1] is None, name
    finally:
        library._destroy()
