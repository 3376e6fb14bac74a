"""kv_commit: every backend against a list-of-lists model, in place, over any layout, dtype and page size."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.packed_trees import Batch, Shape, build, shapes
from torch import Tensor

from specdec_kernels import CacheTable, kv_commit, kv_commit_pages, kv_commit_scratch, use_backend
from specdec_kernels.dispatch import extension

NEEDS_C = pytest.mark.skipif(extension.unavailable_reason() is not None, reason=str(extension.unavailable_reason()))
BACKENDS = ["reference", pytest.param("cpu", marks=NEEDS_C)]
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.uint8]


def accepted_paths(case: Batch, generator: torch.Generator, spare: int) -> tuple[Tensor, Tensor]:
    """Returns a random root path per row, as the verify operators do: path [B, D + 1], num_accepted [B]."""
    deepest = max([len(p) for p in case.parents] + [1]) + spare
    path = torch.full((len(case.parents), deepest), -1, dtype=torch.int32)
    accepted = torch.zeros(len(case.parents), dtype=torch.int32)
    for row, parents in enumerate(case.parents):
        if not parents:
            continue
        walk, node = [], int(torch.randint(len(parents), (1,), generator=generator))
        while node >= 0:
            walk.append(node)
            node = parents[node]
        for i, node in enumerate(reversed(walk)):
            path[row, i] = int(case.offsets[row]) + node
        accepted[row] = len(walk) - 1
    return path, accepted


def model(cache: Tensor, case: Batch, path: Tensor, accepted: Tensor) -> list[list[Any]]:
    """Commits on lists of slots per row."""
    size = cache.shape[1]
    expected = []
    for row, pages in enumerate(case.page_table.tolist()):
        slots = [cache[page, s] for page in pages for s in range(size)]
        length, first = int(case.lengths[row]), int(case.offsets[row])
        if case.parents[row]:
            kept = [slots[length + int(n) - first] for n in path[row, : int(accepted[row]) + 1]]
            slots[length : length + len(kept)] = kept
        expected.append([slot.clone() for slot in slots])
    return expected


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=30, deadline=None)
@given(shape=shapes(most_length=40), layers=st.integers(1, 3), prepared=st.booleans(), spare=st.integers(0, 2))
def test_commits_equal_a_model_of_lists(backend: str, shape: Shape, layers: int, prepared: bool, spare: int) -> None:
    case = build(replace(shape, dtype=torch.float32))
    g = torch.Generator().manual_seed(shape.seed)
    path, accepted = accepted_paths(case, g, spare)
    caches = []
    for layer in range(layers):  # layers of different types and sizes in one call
        like = case.key_cache if layer != 1 else case.value_cache[..., :3]
        values = torch.randint(0, 200, like.shape, generator=g).to(DTYPES[(shape.seed + layer) % 4])
        cache = torch.empty_strided(like.shape, like.stride(), dtype=values.dtype)
        caches.append(cache.copy_(values))
    expected = [model(cache, case, path, accepted) for cache in caches]
    untouched = [cache[0].clone() for cache in caches]
    with use_backend(backend):
        kv_commit(
            CacheTable(caches) if prepared else caches,
            case.page_table,
            case.lengths,
            path,
            case.offsets,
            accepted,
        )
    assert kv_commit.last_backend == backend
    for cache, want, trash in zip(caches, expected, untouched, strict=True):
        for row, pages in enumerate(case.page_table.tolist()):
            got = cache[pages].flatten(0, 1)
            assert all(torch.equal(a, b) for a, b in zip(got, want[row], strict=True))
        assert torch.equal(cache[0], trash)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=20, deadline=None)
@given(shape=shapes(most_length=40), prepared=st.booleans(), spare=st.integers(0, 2))
def test_commits_from_a_scratch(backend: str, shape: Shape, prepared: bool, spare: int) -> None:
    """The same slots as after staging every node and committing in place."""
    case = build(replace(shape, dtype=torch.float32))
    path, accepted = accepted_paths(case, torch.Generator().manual_seed(shape.seed), spare)
    nodes = torch.randn(case.query.shape[0], *case.key_cache.shape[2:])
    scales = torch.rand(*case.key_cache.shape[:2], 3).half()
    caches, scratch = [case.key_cache, scales], [nodes, nodes[:, 0, :3].half()]
    expected = []
    for cache, held in zip(caches, scratch, strict=True):
        staged = cache.clone()
        for row, pages in enumerate(case.page_table.long()):
            first, last = case.offsets[row : row + 2].tolist()
            at = int(case.lengths[row]) + torch.arange(last - first)
            staged[pages[at // cache.shape[1]], at % cache.shape[1]] = held[first:last]
        expected.append(model(staged, case, path, accepted))
    rows, lengths = torch.arange(len(case.parents), dtype=torch.int32), case.lengths.clone()
    tables = (CacheTable(caches), CacheTable.packed(scratch)) if prepared else (caches, scratch)
    with use_backend(backend):
        kv_commit_scratch(*tables, case.page_table, case.lengths, path, case.offsets, accepted, rows, lengths)
    for row, pages in enumerate(case.page_table.tolist()):
        kept = int((path[row, : int(accepted[row]) + 1] >= 0).sum())
        assert int(lengths[row]) == int(case.lengths[row]) + kept
        for cache, want in zip(caches, expected, strict=True):
            got = cache[pages].flatten(0, 1)[: int(lengths[row])]
            assert all(torch.equal(a, b) for a, b in zip(got, want[row], strict=False))


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=20, deadline=None)
@given(shape=shapes(most_length=40), spare=st.integers(0, 2))
def test_commits_of_page_ids(backend: str, shape: Shape, spare: int) -> None:
    """Pages of one slot: reading the cache through the new table equals reading a cache whose slots have moved."""
    case = build(replace(shape, dtype=torch.float32, page_size=1))
    path, accepted = accepted_paths(case, torch.Generator().manual_seed(shape.seed), spare)
    expected, before = model(case.key_cache, case, path, accepted), case.page_table.clone()
    rows, lengths = torch.arange(len(case.parents), dtype=torch.int32).flip(0), torch.zeros(4, dtype=torch.int32)
    own = torch.zeros(4, before.shape[1], dtype=torch.int32)
    own[rows.long()] = before
    with use_backend(backend):
        kv_commit_pages(before, case.lengths, path, case.offsets, accepted, rows, lengths, own)
    for row, want in enumerate(expected):
        pages, length = own[int(rows[row])], int(lengths[rows[row]])
        assert sorted(pages.tolist()) == sorted(before[row].tolist()), "no page is lost"
        got = case.key_cache[pages.long()].flatten(0, 1)
        assert length >= int(case.lengths[row])
        assert all(torch.equal(a, b) for a, b in zip(got[:length], want, strict=False))


@NEEDS_C
def test_bad_arguments_of_other_commits() -> None:
    case, path, accepted = small()
    lengths, rows = torch.zeros(2, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    trees = (case.page_table, case.lengths, path, case.offsets, accepted)
    with use_backend("cpu"):
        with pytest.raises(
            ValueError, match=r"kv_commit_scratch: slots of 1 scratch tensors are .*, expected those of the 2"
        ):
            kv_commit_scratch([case.key_cache, case.value_cache], [torch.zeros(4, 2, 64)], *trees)
        with pytest.raises(ValueError, match=r"(?s)kv_commit_scratch.*path.*< 2"):
            kv_commit_scratch([case.key_cache], [torch.zeros(2, 2, 64)], *trees)
        with pytest.raises(ValueError, match="kv_commit_pages: page_table and cache_page_table are the same memory"):
            kv_commit_pages(*trees, rows, lengths[:1], case.page_table)
        with pytest.raises(ValueError, match=r"kv_commit_scratch: tables \[1, 6\] and \[2, 6\] do not fit"):
            tables = CacheTable([case.key_cache]), CacheTable.packed([torch.zeros(4, 2, 64)] * 2)
            layouts = [each.device_layout for each in tables]
            torch.ops.specdec.kv_commit_table(*layouts, tables[0].pages, tables[0].page_size, 4, *trees)
        with pytest.raises(ValueError, match="kv_commit_pages: cache_page_table is"):
            kv_commit_pages(*trees, rows, lengths, torch.zeros(2, 99, dtype=torch.int32))
        with pytest.raises(ValueError, match=r"(?s)kv_commit_pages.*slot of row 0 is"):
            own = case.page_table.clone()
            kv_commit_pages(trees[0], trees[1] + 500, *trees[2:], rows, lengths[:1], own)


@pytest.mark.parametrize("backend", BACKENDS)
def test_overlapping_memory_is_refused(backend: str) -> None:
    """The same tensor, or an overlapping view."""
    case, path, accepted = small()
    table, lengths = case.page_table.repeat(2, 1), case.lengths.repeat(2)
    rest, rows = (path, case.offsets, accepted), torch.ones(1, dtype=torch.int32)
    with use_backend(backend):
        for view in (table[:1], table[1:]):
            with pytest.raises(
                ValueError, match="kv_commit_pages: page_table and cache_page_table are the same memory"
            ):
                kv_commit_pages(view, case.lengths, *rest, rows, lengths, table)
        for view in (lengths[:1], lengths[1:]):
            with pytest.raises(ValueError, match="kv_commit: lengths and cache_lengths are the same memory"):
                kv_commit([case.key_cache], case.page_table, view, *rest, rows, lengths)


@NEEDS_C
@pytest.mark.parametrize("advance", [False, True])
def test_a_compiled_program_keeps_what_a_table_commits(advance: bool) -> None:
    case, path, accepted = small()
    table, want = CacheTable([case.key_cache.clone(), case.value_cache.clone()]), [case.key_cache, case.value_cache]
    own = (torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)) if advance else ()
    trees = (case.page_table, case.lengths, path, case.offsets, accepted)
    kv_commit(want, *trees)
    torch._dynamo.reset()
    program = torch.compile(lambda *args: kv_commit(table, *args), backend="aot_eager", fullgraph=True)
    program(*trees, *own)
    assert all(torch.equal(got, each) for got, each in zip(table, want, strict=True))
    assert not advance or own[1].tolist() == [int(case.lengths[0]) + 2]


@NEEDS_C
def test_a_compiled_program_breaks_for_a_commit_out_of_a_scratch() -> None:
    case, path, accepted = small()
    scratch = [torch.randn(4, *case.key_cache.shape[2:])]
    got, want = (CacheTable([case.key_cache.clone()]) for _ in range(2))
    trees = (case.page_table, case.lengths, path, case.offsets, accepted)
    kv_commit_scratch(want, scratch, *trees)
    for whole in (True, False):
        torch._dynamo.reset()
        program = torch.compile(
            lambda *args: kv_commit_scratch(got, scratch, *args), backend="aot_eager", fullgraph=whole
        )
        if whole:
            with pytest.raises(Exception, match="call it between graphs"):
                program(*trees)
        else:
            program(*trees)
    assert torch.equal(got[0], want[0])


@pytest.mark.parametrize("backend", ["reference", pytest.param("cpu", marks=NEEDS_C)])
def test_lengths_of_the_cache_advance_by_the_kept_tokens(backend: str) -> None:
    case, path, accepted = small()
    lengths, rows = torch.tensor([7, 8, 9], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    arguments = ([case.key_cache], case.page_table, case.lengths)
    with use_backend(backend):
        kv_commit(*arguments, path, case.offsets, accepted, rows, lengths)
        assert lengths.tolist() == [7, 8, int(case.lengths[0]) + 2]
        nothing = torch.full_like(path, -1)
        kv_commit(*arguments, nothing, case.offsets, accepted * 0, rows, lengths)
        assert lengths.tolist() == [7, 8, int(case.lengths[0])]
        with pytest.raises(ValueError, match="rows and cache_lengths go together"):
            kv_commit(*arguments, path, case.offsets, accepted, rows)


@NEEDS_C
def test_a_row_outside_the_cache_is_refused_before_anything_moves() -> None:
    case, path, accepted = small()
    before, lengths = case.key_cache.clone(), torch.zeros(3, dtype=torch.int32)
    for row in (-1, 3):
        rows = torch.tensor([row], dtype=torch.int32)
        with use_backend("cpu"), pytest.raises(ValueError, match=r"(?s)kv_commit.*rows"):
            kv_commit([case.key_cache], case.page_table, case.lengths, path, case.offsets, accepted, rows, lengths)
    assert torch.equal(case.key_cache, before) and not lengths.any()


@NEEDS_C
def test_threads_do_not_change_the_result() -> None:
    case = build(Shape([60], [100], width=256, heads=8, kv_heads=8, deep=True))
    path, accepted = accepted_paths(case, torch.Generator().manual_seed(4), 0)
    caches = [case.key_cache.clone() for _ in range(24)]
    torch.set_num_threads(2)
    try:
        kv_commit(caches, case.page_table, case.lengths, path, case.offsets, accepted)
    finally:
        torch.set_num_threads(1)
    with use_backend("reference"):
        kv_commit([case.key_cache], case.page_table, case.lengths, path, case.offsets, accepted)
    assert all(torch.equal(cache, case.key_cache) for cache in caches)


def small() -> tuple[Batch, Tensor, Tensor]:
    case = build(Shape([4], [10]))
    return case, torch.tensor([[0, 2, -1]], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)


@NEEDS_C
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"path": torch.tensor([[0, 9]], dtype=torch.int32)}, "path"),
        ({"num_accepted": torch.tensor([7], dtype=torch.int32)}, "num_accepted"),
        ({"page_table": torch.tensor([[99]], dtype=torch.int32)}, "page"),
        ({"lengths": torch.tensor([10])}, "int32"),
        ({"lengths": torch.tensor([500], dtype=torch.int32)}, "slot"),
        ({"offsets": torch.tensor([0], dtype=torch.int32)}, "offsets"),
    ],
)
def test_bad_arguments_are_refused_before_anything_moves(change: dict[str, Tensor], words: str) -> None:
    case, path, accepted = small()
    names = ("page_table", "lengths", "path", "offsets", "num_accepted")
    values = (case.page_table, case.lengths, path, case.offsets, accepted)
    before = case.key_cache.clone()
    with use_backend("cpu"), pytest.raises(ValueError, match=f"(?s)kv_commit.*{words}"):
        kv_commit([case.key_cache], *(change.get(n, v) for n, v in zip(names, values, strict=True)))
    assert torch.equal(case.key_cache, before)


def test_tables_refuse_what_they_cannot_describe() -> None:
    with pytest.raises(ValueError, match="empty"):
        CacheTable([])
    with pytest.raises(ValueError, match="one table serves one page table"):
        CacheTable([torch.zeros(2, 4, 1, 8), torch.zeros(3, 4, 1, 8)])
    with pytest.raises(ValueError, match="only swaps two axes"):
        CacheTable([torch.zeros(2, 4, 6, 8)[:, :, ::2, ::2]])


@NEEDS_C
def test_opcheck() -> None:
    case, path, accepted = small()
    inputs = ([case.key_cache, case.value_cache], case.page_table, case.lengths, path, case.offsets, accepted)
    torch.library.opcheck(torch.ops.specdec.kv_commit.default, inputs)
