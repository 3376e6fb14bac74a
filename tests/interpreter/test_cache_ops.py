"""kv_slots, kv_stage and kv_commit in Triton against the references: equal, in guarded memory."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.interpreter import guarded
from oracles.packed_trees import Shape, build
from torch import Tensor

from specdec_kernels import (
    CacheTable,
    UnsupportedError,
    kv_commit,
    kv_commit_pages,
    kv_commit_scratch,
    kv_slots,
    kv_stage,
    use_backend,
)

pytest.importorskip("triton")
launch = import_module("specdec_kernels.ops.kv_commit.launch")
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
    results = []
    for backend in ("reference", "triton"):
        own = guarded(lengths)
        with use_backend(backend):
            found = kv_slots(table, own, rows, ints([0, *accumulate(counts)]), depth, nodes, page_size, advance)
        results.append((*found, own))
    for want, got in zip(*results, strict=True):
        assert want.dtype == got.dtype and torch.equal(want, got)


def test_tokens_without_space_go_to_the_trash() -> None:
    table, lengths = torch.ones(2, 2, **INTS), ints([7, 0])
    with use_backend("triton"):
        _, _, slots, _ = kv_slots(table, lengths, ints([0, 5]), ints([0, 2, 3]), None, 3, 4)
        with pytest.raises(ValueError, match=r"kv_slots: .* do not fit"):
            kv_slots(table, lengths, ints([0, 5]), ints([0, 2]), None, 3, 4)
        _, _, before, _ = kv_slots(table, ints([-9, 0]), ints([0, 1]), ints([0, 2, 3]), None, 3, 4)
    assert slots.tolist() == [7, -1, -1] and before.tolist() == [-1, -1, 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("head_first", [False, True])
def test_staging(dtype: torch.dtype, head_first: bool) -> None:
    case = build(Shape([5, 4], [10, 20], heads=6, kv_heads=3, width=40, head_first=head_first))
    key, value = (torch.randint(0, 200, (9, 6, 40)).to(dtype)[:, ::2] for _ in range(2))
    slots = guarded((torch.randperm(40)[:9] + 16).index_fill(0, torch.tensor([2]), -1))
    results = []
    for backend in ("reference", "triton"):
        caches = [torch.empty_strided(c.shape, c.stride(), dtype=dtype).fill_(3) for c in (case.key_cache,) * 2]
        with use_backend(backend):
            kv_stage(key, value, *caches, slots)
        results.append(caches)
    assert all(torch.equal(want, got) for want, got in zip(*results, strict=True))
    with use_backend("triton"), pytest.raises(ValueError, match="kv_stage: key is"):
        kv_stage(key[:3], value, *results[0], slots)


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
    what=st.sampled_from(["in place", "in place", "scratch", "pages"]),
    seed=st.integers(0, 2**16),
)
def test_commits(
    counts: list[int], page_size: int, head_first: bool, deep: bool, dtype: torch.dtype, what: str, seed: int
) -> None:
    """Keys, values and scales in one call: caches whose slots differ in size and alignment."""
    lengths = [(seed * (row + 3)) % 50 for row in range(len(counts))]
    page_size = 1 if what == "pages" else page_size
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
        accepted[row] = max(0, len(walk) - 1) + seed % 2  # a path may end before it is used up
    rows = torch.arange(len(counts), **INTS).flip(0)
    trees = [guarded(each) for each in (case.page_table, case.lengths, path, case.offsets, accepted, rows)]
    g = torch.Generator().manual_seed(seed)
    scales = torch.rand(*case.key_cache.shape[:2], 3, generator=g)
    nodes = [torch.randint(0, 200, (sum(counts) + 1, 3, 24), generator=g).to(dtype), torch.rand(sum(counts) + 1, 3)]
    results = []
    for backend in ("reference", "triton"):
        cache = torch.empty_strided(case.key_cache.shape, case.key_cache.stride(), dtype=dtype)
        cache.copy_(torch.randint(0, 200, cache.shape, generator=torch.Generator().manual_seed(1)))
        caches, own = [cache, scales.clone()], torch.zeros(len(counts) + 1, **INTS)
        own_table = torch.zeros(len(counts) + 1, case.page_table.shape[1], **INTS)
        with use_backend(backend):
            if what == "pages":
                kv_commit_pages(*trees, own, own_table)
            elif what == "scratch":
                kv_commit_scratch(CacheTable(caches), CacheTable.packed(nodes), *trees, own)
            else:
                kv_commit(CacheTable(caches), *trees, own)
        results.append([*caches, own, own_table])
    for want, got in zip(*results, strict=True):
        assert torch.equal(want, got)


def test_commits_touch_no_memory_beyond_their_tensors() -> None:
    """Data that the host does not check: page ids, nodes, lengths and rows that do not exist."""
    case = build(Shape([4], [10]))
    path, accepted = torch.tensor([[0, 2, 3]], **INTS), torch.tensor([2], **INTS)
    broken = case.page_table.clone()
    broken[0, :] = 99
    before = case.key_cache.clone()
    for table, length, row in ((broken, 10, 0), (case.page_table, 10**6, 7), (case.page_table, -(10**6), -1)):
        cache, own = guarded(case.key_cache), guarded(torch.zeros(2, **INTS))
        own_table = guarded(torch.zeros(2, table.shape[1], **INTS))
        trees = (guarded(table), torch.tensor([length], **INTS), path, case.offsets, accepted)
        with use_backend("triton"):
            kv_commit(CacheTable([cache]), *trees, torch.tensor([row], **INTS), own)
            scratch = guarded(torch.ones(2, 2, 64))  # fewer nodes than on the path
            kv_commit_scratch(CacheTable([cache]), [scratch], *trees, torch.tensor([row], **INTS), own)
            kv_commit_pages(*trees, torch.tensor([row], **INTS), own, own_table)
        assert torch.equal(cache, before)
        assert own.tolist() == ([13, 0] if row == 0 else [0, 0])


def test_a_node_beyond_the_scratch_is_not_copied() -> None:
    """A valid table and lengths, and a scratch of two nodes for a path with node 3."""
    case = build(Shape([4], [10]))
    path, accepted = torch.tensor([[0, 1, 3]], **INTS), torch.tensor([2], **INTS)
    cache, before = guarded(case.key_cache), case.key_cache.clone()
    with use_backend("triton"):
        trees = (case.page_table, case.lengths, path, case.offsets, accepted)
        kv_commit_scratch(CacheTable([cache]), [guarded(torch.full((2, 2, 64), 7.0))], *trees)
    size = cache.shape[1]
    slots = [(int(case.page_table[0, at // size]), at % size) for at in range(10, 13)]
    for slot, value in zip(slots, (torch.full((2, 64), 7.0),) * 2 + (before[slots[2]],), strict=True):
        assert torch.equal(cache[slot], value)


def test_bad_arguments_of_commits() -> None:
    case = build(Shape([2], [5]))
    path, accepted = torch.tensor([[0, 1]], **INTS), torch.ones(1, **INTS)
    trees = (case.page_table, case.lengths, path, case.offsets, accepted)
    rows = (torch.zeros(1, **INTS), torch.zeros(1, **INTS))
    with use_backend("triton"):
        with pytest.raises(UnsupportedError, match="a CacheTable made from it once"):
            kv_commit([case.key_cache], *trees)
        with pytest.raises(ValueError, match="kv_commit_scratch: slots of 1 scratch tensors are"):
            kv_commit_scratch(CacheTable([case.key_cache]), [torch.zeros(2, 2, 32)], *trees)
        with pytest.raises(ValueError, match=r"kv_commit: path is torch\.int64"):
            kv_commit(CacheTable([case.key_cache]), *trees[:2], path.long(), *trees[3:])
        with pytest.raises(ValueError, match="kv_commit: rows and cache_lengths go together"):
            kv_commit(CacheTable([case.key_cache]), *trees, rows[0])
        table, lengths = case.page_table.repeat(2, 1), torch.zeros(2, **INTS)
        for view in (table[:1], table[1:]):
            with pytest.raises(ValueError, match=r"kv_commit_pages: page_table and cache_page_table .* other memory"):
                kv_commit_pages(view, *trees[1:], rows[0], lengths, table)
        with pytest.raises(ValueError, match=r"kv_commit: lengths and cache_lengths .* other memory"):
            kv_commit(CacheTable([case.key_cache]), trees[0], lengths[1:], *trees[2:], rows[0], lengths)
        elsewhere = [each.to("meta") for each in trees]
        with pytest.raises(ValueError, match=r"kv_commit: page_table is .* on meta; expected .* on cpu"):
            launch.kv_commit(CacheTable([case.key_cache]), *elsewhere)
        with pytest.raises(ValueError, match="kv_commit_scratch: the scratch is on meta; expected cpu like the caches"):
            launch.kv_commit_scratch(CacheTable([case.key_cache]), [torch.zeros(2, 2, 64, device="meta")], *trees)
