"""Launches with memory of the caller's, and launches behind torch.ops.specdec: the same answers, nothing allocated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracles.recorded_calls import calls_of
from torch.utils._python_dispatch import TorchDispatchMode

from specdec_kernels import OPS, expect, registered, use_backend
from specdec_kernels.agreement import TOLERANCE, difference, results, sample, tensors_in
from specdec_kernels.samples import Sizes

SIZES = Sizes(vocab=3000, nodes=4)
DIRECT = sorted(name for name, op in OPS.items() if op._direct)


class NothingNew(TorchDispatchMode):
    """Fails where a tensor with memory of its own is made."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        made = {each.untyped_storage().data_ptr() for each in tensors_in(found) if each.numel()}
        given = [*args, *(kwargs or {}).values()]
        assert made <= {each.untyped_storage().data_ptr() for each in tensors_in(given)}, f"{func} allocates"
        return found


@pytest.mark.parametrize("name", DIRECT)
def test_out_and_workspace_hold_the_same_answer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with use_backend("reference"):
        call = sample(name, SIZES)
        want = list(tensors_in(OPS[name](*call.arguments, **call.options)))
    with use_backend("triton"):
        size = OPS[name].workspace_size(*call.arguments, **call.options)
        given = {
            "out": want[0].clone() if len(want) == 1 else tuple(map(torch.empty_like, want)),
            "workspace": torch.full((size,), 0xAB, dtype=torch.uint8),
        }
        assert size > 0
        if name == "chain_verify_logits":  # the marks of rows that were passed by take a few small masks
            found = OPS[name](*call.arguments, **call.options, **given)
        else:
            with NothingNew(), monkeypatch.context() as patched:
                patched.setattr(expect, "readable", lambda value: False)  # on a GPU values are not looked at
                found = OPS[name](*call.arguments, **call.options, **given)
        for got, expected, place in zip(tensors_in(found), want, tensors_in(given["out"]), strict=True):
            assert difference(got, expected, TOLERANCE[torch.float32])[1] is None
            assert got.data_ptr() == place.data_ptr()
        with pytest.raises(ValueError, match=rf"{name}.*: workspace is .*expected contiguous torch.uint8 \[\d+\]"):
            OPS[name](*call.arguments, **call.options, out=given["out"], workspace=given["workspace"][:-256])
        with pytest.raises(ValueError, match=r": out.*expected"):
            OPS[name](*call.arguments, **call.options, out=[], workspace=given["workspace"])


def test_the_dispatcher_reaches_the_launches() -> None:
    """With the launches under the key of the CPU, torch.ops.specdec.* is Triton for calls that were recorded before."""
    names = sorted({*OPS} & set(registered.LAUNCHES))
    recorded = {}
    for name in names:
        call = sample(name, SIZES)
        with use_backend("cpu"):
            recorded[name] = calls_of(name, lambda n=name, c=call: OPS[n](*c.arguments, **c.options))[0]
    library = registered.register("CPU", override=True)
    try:
        for name in names:
            with use_backend("reference"):
                call = sample(name, SIZES)
                want = results(name, call)
            got = getattr(torch.ops.specdec, name)(*recorded[name])
            if not call.writes:
                made = list(tensors_in(got))
                for one, other in zip(made, want, strict=True):
                    if name == "tree_plan":  # as many ancestor words as the largest row needs, or more
                        one, other = one[..., : other.shape[-1]], other[..., : one.shape[-1]]
                    assert difference(one, other, TOLERANCE[torch.float32])[1] is None, name
    finally:
        library._destroy()
