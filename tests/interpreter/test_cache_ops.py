"""kv_slots, kv_stage and kv_commit in Triton against the references: equal, in guarded memory."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.interpreter import guarded
from oracles.packed_trees import Shape, build
from torch import Tensor

from specdec_kernels import CacheTable, UnsupportedError, kv_commit, kv_slots, kv_stage, use_backend

INTS: dict[str, Any] = {"dtype": torch.int32}


def ints(values: list[int]) -> Tensor:
    return guarded(torch.tensor(values, **INTS))


@settings(max_examples=25, deadline=None)
@given(
    counts=st.lists(st.sampled_from([0, 1, 7, 40]), max_size=3),
    page_size=st.sampled_from([1, 3, 16]),
    tail=st.sampled_from([0, 3]),
    tree=st.booleans(),
    advance=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_slots(counts: list[int], page_size: int, tail: int, tree: bool, advance: bool, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    capacity, columns = len(counts) + 1, -(-100 // page_size)
    table = guarded(torch.randint(1, 99, (capacity, columns), generator=g, **INTS))
    rows = guarded(torch.randperm(capacity, generator=g)[: len(counts)].int())
    lengths = guarded(torch.randint(0, 60, (capacity,), generator=g, **INTS))
    nodes = sum(counts) + tail
    depth = guarded(torch.randint(0, 9, (nodes,), generator=g, **INTS)) if tree else None
    answers = []
    for backend in ("reference", "triton"):
        own = guarded(lengths)
        with use_backend(backend):
            found = kv_slots(table, own, rows, ints([0, *accumulate(counts)]), depth, nodes, page_size, advance)
        answers.append((*found, own))
    for want, got in zip(*answers, strict=True):
        assert want.dtype == got.dtype and torch.equal(want, got)


def test_what_has_no_room_goes_to_the_trash() -> None:
    table, lengths = torch.ones(2, 2, **INTS), ints([7, 0])
    with use_backend("triton"):
        _, _, slots, _ = kv_slots(table, lengths, ints([0, 5]), ints([0, 2, 3]), None, 3, 4)
        with pytest.raises(ValueError, match=r"kv_slots: .* do not fit"):
            kv_slots(table, lengths, ints([0, 5]), ints([0, 2]), None, 3, 4)
    assert slots.tolist() == [7, -1, -1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("head_first", [False, True])
def test_staging(dtype: torch.dtype, head_first: bool) -> None:
    case = build(Shape([5, 4], [10, 20], heads=6, kv_heads=3, width=40, head_first=head_first))
    key, value = (torch.randint(0, 200, (9, 6, 40)).to(dtype)[:, ::2] for _ in range(2))
    slots = guarded((torch.randperm(40)[:9] + 16).index_fill(0, torch.tensor([2]), -1))
    answers = []
    for backend in ("reference", "triton"):
        caches = [torch.empty_strided(c.shape, c.stride(), dtype=dtype).fill_(3) for c in (case.key_cache,) * 2]
        with use_backend(backend):
            kv_stage(key, value, *caches, slots)
        answers.append(caches)
    assert all(torch.equal(want, got) for want, got in zip(*answers, strict=True))
    with use_backend("triton"), pytest.raises(ValueError, match="kv_stage: key is"):
        kv_stage(key[:3], value, *answers[0], slots)


def test_a_slot_beyond_the_cache_is_skipped() -> None:
    case = build(Shape([1], [3]))
    caches = guarded(case.key_cache), guarded(case.value_cache)
    with use_backend("triton"):
        kv_stage(torch.ones(1, 2, 64), torch.ones(1, 2, 64), *caches, torch.tensor([10**6]))
    assert torch.equal(caches[0], case.key_cache) and torch.equal(caches[1], case.value_cache)


@settings(max_examples=20, deadline=None)
@given(
    counts=st.lists(st.sampled_from([0, 1, 7, 40]), min_size=1, max_size=3),
    page_size=st.sampled_from([1, 3, 16]),
    head_first=st.booleans(),
    deep=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.uint8]),
    seed=st.integers(0, 2**16),
)
def test_commits(
    counts: list[int], page_size: int, head_first: bool, deep: bool, dtype: torch.dtype, seed: int
) -> None:
    lengths = [(seed * (row + 3)) % 50 for row in range(len(counts))]
    shape = Shape(counts, lengths, page_size=page_size, width=24, head_first=head_first, deep=deep, seed=seed)
    case = build(replace(shape, kv_heads=3, heads=3))
    path = torch.full((len(counts), max(counts) + 2), -1, **INTS)
    accepted = torch.zeros(len(counts), **INTS)
    for row, parents in enumerate(case.parents):
        node, walk = len(parents) - 1, []
        while node >= 0:
            walk.insert(0, node + int(case.offsets[row]))
            node = parents[node]
        path[row, : len(walk)] = torch.tensor(walk, **INTS)
        accepted[row] = max(0, len(walk) - 1)
    rows = torch.arange(len(counts), **INTS).flip(0)
    answers = []
    for backend in ("reference", "triton"):
        caches = []
        for seed_of_cache in range(3):
            cache = torch.empty_strided(case.key_cache.shape, case.key_cache.stride(), dtype=dtype)
            generator = torch.Generator().manual_seed(seed_of_cache)
            caches.append(cache.copy_(torch.randint(0, 200, cache.shape, generator=generator)))
        own = torch.zeros(len(counts) + 1, **INTS)
        inputs = (case.page_table, case.lengths, path, case.offsets, accepted, rows)
        with use_backend(backend):
            kv_commit(CacheTable(caches), *map(guarded, inputs), own)
        answers.append([*caches, own])
    for want, got in zip(*answers, strict=True):
        assert torch.equal(want, got)


def test_commits_of_unlike_caches_are_left_to_others() -> None:
    case = build(Shape([2], [5]))
    inputs = (case.page_table, case.lengths, torch.tensor([[0, 1]], **INTS), case.offsets, torch.ones(1, **INTS))
    unlike = CacheTable([case.key_cache, case.value_cache[..., :3].contiguous()])
    with use_backend("triton"):
        with pytest.raises(UnsupportedError, match="differ in size"):
            kv_commit(unlike, *inputs)
        with pytest.raises(UnsupportedError, match="a CacheTable made from it once"):
            kv_commit([case.key_cache], *inputs)
