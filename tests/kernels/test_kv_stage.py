"""kv_stage: every backend against assignment slot by slot, over strides, layouts, dtypes and trash."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.packed_trees import Shape, build, shapes
from torch import Tensor

from specdec_kernels import kv_stage, use_backend
from specdec_kernels.dispatch import extension

NEEDS_C = pytest.mark.skipif(extension.unavailable_reason() is not None, reason=str(extension.unavailable_reason()))
BACKENDS = ["reference", pytest.param("cpu", marks=NEEDS_C)]


def entries(nodes: int, heads: int, width: int, kind: str, g: torch.Generator) -> Tensor:
    """Returns new keys or values [nodes, heads, width], contiguous or strided as after a model's projections."""
    if kind == "fused":  # a slice of one projection of queries, keys and values
        return torch.randn(nodes, 3 * heads * width, generator=g)[:, heads * width :].unflatten(1, (2 * heads, width))[
            :, :heads
        ]
    if kind == "head_first":
        return torch.randn(heads, nodes, width, generator=g).transpose(0, 1)
    return torch.randn(nodes, heads, width, generator=g)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=30, deadline=None)
@given(shape=shapes(most_length=30), kind=st.sampled_from(["plain", "fused", "head_first"]), trash=st.booleans())
def test_nodes_are_stored_in_their_slots(backend: str, shape: Shape, kind: str, trash: bool) -> None:
    case = build(replace(shape, dtype=torch.float32))
    g = torch.Generator().manual_seed(shape.seed)
    pages, page_size, heads, width = case.key_cache.shape
    nodes = min(len(case.query), (pages - 1) * page_size)
    slots = torch.randperm((pages - 1) * page_size, generator=g)[:nodes] + page_size  # page 0 is for trash
    if trash and nodes:
        slots[0] = -1
    dtype = shape.dtype
    key, value = (entries(nodes, heads, width, kind, g).to(dtype) for _ in range(2))
    if kind != "plain" and dtype == torch.float32 and nodes > 1 and heads > 1:
        assert not key.is_contiguous()
    caches = [c.to(dtype) for c in (case.key_cache, case.value_cache)]
    expected = [c.clone() for c in caches]
    for i, slot in enumerate(slots.tolist()):
        for new, cache in zip((key, value), expected, strict=True):
            cache[max(slot, 0) // page_size, max(slot, 0) % page_size] = new[i]
    with use_backend(backend):
        kv_stage(key, value, caches[0], caches[1], slots)
    assert kv_stage.last_backend == backend
    assert all(torch.equal(c, e) for c, e in zip(caches, expected, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_bad_arguments_are_refused(backend: str) -> None:
    case = build(Shape([3], [10]))
    key = torch.zeros(3, 2, 64)
    slots = torch.tensor([17, 18, 19])
    caches = case.key_cache, case.value_cache
    with use_backend(backend):
        with pytest.raises(ValueError, match="kv_stage: slot"):
            kv_stage(key, key, *caches, slots + 1000)
        with pytest.raises(ValueError, match="kv_stage: key"):
            kv_stage(key[:2], key, *caches, slots)
        with pytest.raises(ValueError, match="kv_stage: value"):
            kv_stage(key, key.double(), *caches, slots)


@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_tensors_of_any_strides(backend: str) -> None:
    case = build(Shape([3], [10]))
    before = case.key_cache.clone()
    empty = torch.zeros(0, 64, 2).transpose(1, 2)
    with use_backend(backend):
        kv_stage(empty, empty, case.key_cache, case.value_cache, torch.zeros(0, dtype=torch.int64))
    assert torch.equal(case.key_cache, before)


@NEEDS_C
def test_opcheck() -> None:
    case = build(Shape([3], [10]))
    key = torch.zeros(3, 2, 64)
    inputs = (key, key.clone(), case.key_cache, case.value_cache, torch.tensor([17, -1, 19]))
    torch.library.opcheck(torch.ops.specdec.kv_stage.default, inputs)
