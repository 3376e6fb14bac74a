"""Arguments of the wrong type: every operator names the first one."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import specdec_kernels
from specdec_kernels import CacheTable, batch_invariant_linear, kv_commit
from specdec_kernels.dispatch.argument_types import explain_wrong_type
from specdec_kernels.dispatch.registry import OPS

assert specdec_kernels


@pytest.mark.parametrize("name", sorted(OPS))
@pytest.mark.parametrize("value", [[1.0], None, "text", 3])
def test_operators_name_arguments_that_are_no_tensors(name: str, value: Any) -> None:
    operator = OPS[name]
    required = [each for each, about in inspect.signature(operator).parameters.items() if about.default is about.empty]
    with pytest.raises(ValueError, match=rf"^{name.removesuffix('_overlay')}: .*(expected|no tensor)"):
        operator(**dict.fromkeys(required, value))


def test_the_message_names_the_argument_and_what_it_is() -> None:
    x, weight = torch.zeros(1, 2), torch.zeros(3, 2)
    with pytest.raises(ValueError, match=r"batch_invariant_linear: weight is list of list; expected a tensor$"):
        batch_invariant_linear(x, weight.tolist())
    with pytest.raises(ValueError, match="kv_commit: caches is list of float; expected a list of tensors"):
        kv_commit([1.0], *[torch.zeros(1)] * 5)


def test_caches_of_a_table_are_no_wrong_argument() -> None:
    caches = CacheTable([torch.zeros(2, 4, 1, 8), torch.zeros(2, 4, 1, 8)])
    with pytest.raises(ValueError, match=r"kv_commit: page_table is list of int; expected a tensor$"):
        kv_commit(caches, [1], *[torch.zeros(1, dtype=torch.int32)] * 4)


def test_memory_that_runs_out_is_no_wrong_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_out(*given: Any, **named: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(batch_invariant_linear, "_select_backend", lambda args, kwargs: ("cpu", run_out))
    with pytest.raises(torch.OutOfMemoryError):
        batch_invariant_linear([1.0], torch.zeros(3, 2))


def test_a_wrong_call_stays_a_type_error() -> None:
    with pytest.raises(TypeError):
        batch_invariant_linear(torch.zeros(1, 2))
    with pytest.raises(TypeError, match="unknown"):
        batch_invariant_linear(torch.zeros(1, 2), torch.zeros(3, 2), unknown=1)


def example(
    one: Tensor,
    pair: tuple[Tensor, Tensor],
    many: Sequence[Tensor],
    maybe: Tensor | None = None,
    number: int = 0,
) -> None:
    """Annotations that are checked, and a number, which is not."""


T = torch.zeros(2)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((T, (T, T), [T]), None),
        ((T, (T, T), T), None),
        ((T, (T, T), (T, T), None, "no number"), None),
        ((T, (T, T), [T], T), None),
        (([1], (T, T), [T]), "op: one is list of int; expected a tensor"),
        ((T, (T,), [T]), "op: pair is tuple of Tensor; expected a tuple of 2 tensors"),
        ((T, [T, T], [T]), None),
        ((T, (T, None), [T]), "op: pair is tuple of Tensor, NoneType; expected a tuple of 2 tensors"),
        ((T, (T, T), [T, 1]), "op: many is list of Tensor, int; expected a list of tensors"),
        ((T, (T, T), [], 3), "op: maybe is int; expected a tensor"),
    ],
)
def test_annotations_decide(given: tuple[Any, ...], words: str | None) -> None:
    assert explain_wrong_type("op", example, given, {}) == words
