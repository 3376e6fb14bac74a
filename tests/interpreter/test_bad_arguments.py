"""Tensors of a wrong dtype, size or layout: refused before a launch, or served correctly."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module

import pytest
import torch
from oracles.interpreter import watched, wrapping
from oracles.launch_cases import CASES, NUMBERS, PARTS, PLAIN, SIZES
from torch import Tensor

from specdec_kernels import OPS, UnsupportedError, use_backend
from specdec_kernels.dispatch import argument_checks
from specdec_kernels.testing.agreement import make_sample, map_tensors, tensors_in
from specdec_kernels.testing.samples_attention import Call

EVERY: dict[str, Callable[[], Call]] = {
    **CASES,
    **{name: partial(make_sample, name, SIZES) for name in sorted(NUMBERS | PARTS)},
}
OTHER = {torch.int32: torch.int64, torch.int64: torch.int32}


def wrong(tensor: Tensor, strided: bool) -> Iterator[Tensor]:
    """Yields wrong tensors: another dtype, shorter, empty, another dimension; integers also narrower and strided."""
    integers = not tensor.dtype.is_floating_point
    yield tensor.to(OTHER.get(tensor.dtype, torch.int64 if integers else torch.int32))
    yield tensor[:-1]
    yield tensor[:0]
    yield tensor[None]
    if integers:
        yield tensor[..., :-1].contiguous()
    if integers and strided:
        yield torch.stack([tensor, tensor], -1)[..., 0]


def exchanged(own: Tensor, other: Tensor, each: Tensor) -> Tensor:
    return other if each is own else each.clone()


@pytest.mark.parametrize("case", EVERY)
def test_arguments_that_a_launch_cannot_take_raise_clear_errors(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(argument_checks, "can_read_values", lambda value: False)
    monkeypatch.setattr(import_module("specdec_kernels.ops.tree_attention.launch"), "_num_processors", lambda device: 3)
    name, plain, refusals = case.split(" ")[0], EVERY[case](), 0
    for own in tensors_in((plain.arguments, tuple(plain.options.values()))):
        for other in wrong(own, strided=case in PLAIN and not case.endswith("_verify")):
            try:
                with use_backend("triton"), wrapping():
                    call = map_tensors(plain, partial(exchanged, own, other))
                    with watched(*tensors_in((call.arguments, tuple(call.options.values())))):
                        OPS[name](*call.arguments, **call.options)
            except UnsupportedError:
                refusals += 1
            except ValueError as refused:
                assert re.match(r"\w+: .*expected", str(refused), re.DOTALL), str(refused)
                refusals += 1
    assert refusals > 3
