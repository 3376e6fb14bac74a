"""process_logits: both backends against the definitions, token by token, on ragged trees."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.logits_processor_cases import Request, arguments, batches, check_nodes, int32, words_of
from torch.utils._python_dispatch import TorchDispatchMode

from specdec_kernels import NodePaths, TokenMasks, process_logits, use_backend
from specdec_kernels.dispatch import argument_checks, extension
from specdec_kernels.ops.process_logits.reference import check

BACKENDS = ["reference"] + ([] if extension.unavailable_reason() else ["cpu"])
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(batch=batches(), seed=st.integers(0, 1000))
def test_every_node_is_processed_for_its_own_prefix(backend: str, dtype: torch.dtype, batch: Any, seed: int) -> None:
    with use_backend(backend):
        check_nodes(process_logits, dtype, batch, seed)


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_vocabularies_are_equal_on_several_threads(backend: str) -> None:
    vocab, rows = 70_001, 8
    request = Request(
        [3, 4], [3, 9], [9, *range(5, 5 + rows - 1)], [-1, *range(rows - 1)], (1.2, 0.5, 0.25), {}, {}, {}
    )
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0))
    allowed = (torch.rand(vocab, generator=torch.Generator().manual_seed(1)) < 0.5).tolist()
    want = logits.clone()
    masks = TokenMasks(words_of([allowed]), torch.zeros(rows, dtype=torch.int32))
    with use_backend("reference"):
        process_logits(want, masks=masks, **arguments([request], 0, None))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with use_backend(backend):
            process_logits(logits, masks=masks, **arguments([request], 0, None))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(logits, want)


def test_infinities_are_kept() -> None:
    """A broken row of a model must not look valid because its broken token is masked."""
    for backend in BACKENDS:
        logits = torch.tensor([[1.0, math.inf, math.nan]])
        paths = NodePaths(torch.tensor([1]), int32([-1]), int32([0, 1]), int32([0]))
        with use_backend(backend):
            process_logits(logits, paths, masks=TokenMasks(int32([[1]]), int32([0])))
        assert logits[0, 0] == 1 and torch.isnan(logits[0, 1:]).all()


def whole() -> dict[str, Any]:
    made = arguments([Request([1], [2], [2, 3], [-1, 0], (1.1, 0.0, 0.0), {1: 1.0}, {}, {4: 2})], 0, None)
    return {"logits": torch.zeros(2, 8), **made, "masks": TokenMasks(int32([[255]]), int32([0, -1]))}


def changed(part: str, **changes: Any) -> dict[str, Any]:
    made = whole()
    return made | {part: replace(made[part], **changes)}


BAD = [
    (lambda: whole() | {"logits": torch.zeros(2, 8, dtype=torch.int32)}, "dtype"),
    (lambda: whole() | {"logits": torch.zeros(3, 8)}, "3 rows; expected 2"),
    (lambda: changed("paths", parents=int32([-1, 1])), r"parents\[1\] is 1"),
    (lambda: changed("paths", parents=int32([0, 0])), r"parents\[0\] is 0"),
    (lambda: changed("paths", offsets=int32([0, 3])), "offsets"),
    (lambda: changed("paths", nodes=int32([0, 2])), r"nodes\[1\] is 2"),
    (lambda: changed("paths", roots=int32([0, 1])), "roots has shape"),
    (lambda: changed("penalties", factors=torch.tensor([[0.0, 0.0, 0.0]])), "repetition"),
    (lambda: changed("penalties", factors=torch.ones(1, 2)), "factors has shape"),
    (lambda: changed("penalties", rows=int32([2])), "rows below 2"),
    (lambda: changed("penalties", sizes=int32([17, 0])), "at most 16"),
    (lambda: changed("penalties", counts=torch.zeros(2, 15, dtype=torch.int32)), "counts has shape"),
    (lambda: changed("additions", values=torch.tensor([math.inf])), "finite number, or -inf"),
    (lambda: changed("additions", values=torch.tensor([math.nan])), "finite number, or -inf"),
    (lambda: changed("additions", offsets=int32([0, 2])), "additions offsets"),
    (lambda: changed("additions", until=int32([1, 2])), "until has shape"),
    (lambda: changed("forced", offsets=int32([1, 0])), "forced offsets"),
    (lambda: changed("masks", index=int32([0, 1])), r"masks index\[1\] is 1"),
    (lambda: changed("masks", words=int32([[1]]), index=int32([0, -2])), r"masks index\[1\] is -2"),
    (lambda: whole() | {"masks": TokenMasks(torch.zeros(1, 0, dtype=torch.int32), int32([0, 0]))}, "at least 1"),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("make", "message"), BAD)
def test_bad_arguments_are_named_and_nothing_is_written(backend: str, make: Any, message: str) -> None:
    call = make()
    logits = call.pop("logits")
    before = logits.clone()
    with use_backend(backend), pytest.raises(ValueError, match=message):
        process_logits(logits, **call)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_arguments_are_taken(backend: str) -> None:
    want, call = whole(), whole()
    strided = torch.zeros(2, 2, dtype=torch.int32)
    strided[:, 0] = call["paths"].parents
    call["paths"] = replace(call["paths"], parents=strided[:, 0])
    with use_backend(backend):
        assert torch.equal(process_logits(call.pop("logits"), **call), process_logits(want.pop("logits"), **want))


def test_checks_compute_nothing_where_values_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU every comparison would be a launch whose result is not read."""

    class Nothing(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError(f"{func} is computed")

    monkeypatch.setattr(argument_checks, "can_read_values", lambda value: False)
    request = Request([3], [9], [0, 1], [-1, 0], (1.2, 0.5, 0.25), {7: 1.5}, {9: 400}, {4: 2})
    processors = arguments([request], 0, [0, 1])
    masks = TokenMasks(torch.zeros(1, 1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32))
    logits = torch.zeros(2, 12)
    with Nothing():
        check(logits, **processors, masks=masks)
