"""tree_attention in Triton against the reference: ragged batches, all options, any split of keys, guarded memory."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.interpreter import guarded
from oracles.packed_trees import Batch, Shape, build
from torch import Tensor

from specdec_kernels import (
    AttentionPlan,
    UnsupportedError,
    attention_plan,
    plan_for,
    tree_attention,
    use_backend,
)
from specdec_kernels.ops.tree_attention.sdpa_kernel import row_mask

pytest.importorskip("triton")
launch = import_module("specdec_kernels.ops.tree_attention.launch")
shares = import_module("specdec_kernels.ops.tree_attention.stream_k")

# Outputs are means of values of size one: absolute errors in units of the dtype's own rounding.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def fenced(case: Batch) -> Batch:
    """Copies a batch into memory that ends with its tensors; data that no node may read is NaN."""
    names = ("query", "page_table", "lengths", "offsets", "ancestors", "depth")
    caches = {}
    for name in ("key_cache", "value_cache"):
        cache = getattr(case, name)
        swapped = cache.transpose(1, 2) if case.shape.head_first else cache
        caches[name] = guarded(swapped.contiguous())
        caches[name] = caches[name].transpose(1, 2) if case.shape.head_first else caches[name]
        used = torch.zeros(cache.shape[:2], dtype=torch.bool)
        for row, count in enumerate(case.shape.counts):
            at = torch.arange(case.shape.lengths[row] + count)
            used[case.page_table[row].long()[at // cache.shape[1]], at % cache.shape[1]] = True
        caches[name][~used] = torch.nan
    return replace(case, **{name: guarded(getattr(case, name)) for name in names}, **caches)


def run(backend: str, case: Batch, causal: bool = False, **kwargs: Any) -> Any:
    tree = () if causal else (case.ancestors, case.depth)
    with use_backend(tree_attention=backend):
        return tree_attention(*case.cache, *tree, scale=case.shape.width**-0.5, **kwargs)


def assert_same(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
    assert got[0].dtype == want[0].dtype and got[1].dtype == want[1].dtype
    assert not got[0].isnan().any() and (got[0] - want[0]).abs().max() <= TOLERANCE[want[0].dtype]
    empty = want[1] == -torch.inf
    assert torch.equal(got[1] == -torch.inf, empty)
    torch.testing.assert_close(got[1][~empty], want[1][~empty], rtol=1e-5, atol=1e-5)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Shape, dict[str, Any]]:
    kv_heads = draw(st.sampled_from([1, 2]))
    shape = Shape(
        counts=draw(st.lists(st.sampled_from([0, 1, 5, 40]), min_size=1, max_size=3).filter(any)),
        lengths=[0, 0, 0],
        page_size=draw(st.sampled_from([1, 3, 16, 64, 256])),
        heads=kv_heads * draw(st.sampled_from([1, 3, 4])),
        kv_heads=kv_heads,
        width=draw(st.sampled_from([40, 64, 80, 128])),
        dtype=draw(st.sampled_from(list(TOLERANCE))),
        head_first=draw(st.booleans()),
        tail=draw(st.sampled_from([0, 3])),
        deep=draw(st.booleans()),
        seed=draw(st.integers(0, 2**20)),
    )
    lengths = [draw(st.sampled_from([0, 1, 63, 64, 130, 300])) for _ in shape.counts]
    option = {
        "causal": draw(st.booleans()),
        "window": draw(st.sampled_from([0, 0, 1, 6, 70])),
        "softcap": draw(st.sampled_from([0.0, 0.0, 2.0, 50.0])),
        "batch_invariant": draw(st.booleans()),
    }
    return replace(shape, lengths=lengths), option | {"sinks": draw(st.booleans())}


@settings(max_examples=25, deadline=None)
@given(case=cases(), count=st.sampled_from([1, 2, 4, 8]))
def test_the_kernel_equals_the_reference(case: tuple[Shape, dict[str, Any]], count: int) -> None:
    batch, option = fenced(build(case[0])), dict(case[1])
    option["sinks"] = torch.randn(batch.shape.heads) if option["sinks"] else None
    want = run("reference", batch, return_lse=True, **option)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "choose_pieces", lambda *_: count)
        launch._partition.cache_clear()
        got = run("triton", batch, return_lse=True, **option)
    launch._partition.cache_clear()
    assert_same(got, want)


def programs(count: int) -> pytest.MonkeyPatch:
    """Fixes the number of programs of the grid, for any device."""
    patch = pytest.MonkeyPatch()
    patch.setattr(launch, "_num_processors", lambda _: 1)
    patch.setattr(launch, "programs_per_processor", lambda _: count)
    return patch


def planned(case: Batch, count: int, causal: bool = False, window: int = 0) -> AttentionPlan:
    query, keys, _, table, lengths, offsets = case.cache
    patch = programs(count)
    try:
        with use_backend("triton"):
            plan = plan_for(query, keys, table, lengths, offsets, None if causal else case.ancestors, window=window)
    finally:
        patch.undo()
    assert isinstance(plan, AttentionPlan) and plan.programs == count
    return plan


@settings(max_examples=12, deadline=None)
@given(case=cases(), count=st.sampled_from([1, 3, 7, 64]))
def test_shares_of_a_fixed_grid_equal_the_reference(case: tuple[Shape, dict[str, Any]], count: int) -> None:
    batch, option = fenced(build(case[0])), dict(case[1])
    option["sinks"] = torch.randn(batch.shape.heads) if option["sinks"] else None
    option["batch_invariant"] = False
    want = run("reference", batch, return_lse=True, **option)
    plan = planned(batch, count, option["causal"], option["window"])
    with use_backend("triton"):
        size = tree_attention.workspace_size(*batch.cache, scale=1.0, plan=plan)
    workspace = guarded(torch.full((size,), 255, dtype=torch.uint8))  # not a number, wherever it is read
    got = run("triton", batch, return_lse=True, plan=plan, workspace=workspace, **option)
    assert_same(got, want)
    again = run("triton", batch, return_lse=True, plan=plan, workspace=workspace, **option)
    assert torch.equal(got[0], again[0]) and torch.equal(got[1], again[1])


@settings(max_examples=15, deadline=None)
@given(
    counts=st.lists(st.sampled_from([0, 1, 5, 40]), min_size=1, max_size=5),
    tail=st.sampled_from([0, 3, 40]),
    group=st.sampled_from([1, 3, 4]),
    programs=st.sampled_from([1, 5, 64]),
    causal=st.booleans(),
    window=st.sampled_from([0, 1, 70]),
    seed=st.integers(0, 2**16),
)
def test_plans_equal_the_reference(
    counts: list[int], tail: int, group: int, programs: int, causal: bool, window: int, seed: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    lengths = guarded(torch.randint(0, 300, (len(counts),), generator=g, dtype=torch.int32))
    offsets = guarded(torch.tensor([0, *torch.tensor(counts).cumsum(0)], dtype=torch.int32))
    numbers = {"kv_heads": 2, "group": group, "block_m": 16, "block_n": 32, "programs": programs}
    plans = []
    for backend in ("reference", "triton"):
        size = 2 * ((sum(counts) + tail) * group // 16 + len(counts) + 1) + 1 + programs
        out = guarded(torch.full((size,), -7, dtype=torch.int32))
        given = {**numbers, "causal": causal, "window": window, "out": out}
        with use_backend(backend), pytest.MonkeyPatch.context() as patch:
            patch.setattr(shares, "PLAN_BLOCK", 4)
            plans.append(attention_plan(lengths, offsets, sum(counts) + tail, **given))
        assert plans[-1].starts.data_ptr() == out.data_ptr()
    for name in ("starts", "rows", "firsts"):
        assert torch.equal(*(getattr(plan, name) for plan in plans)), name
    total = int(plans[0].starts[-1])
    assert max(-(-total * 2 // programs), 2) * programs >= total * 2, "shares cover all tiles"


def test_a_plan_serves_its_own_shapes_and_options_only() -> None:
    case = fenced(build(Shape([5, 0, 1], [200, 3, 65], dtype=torch.float16)))
    plan = planned(case, 5)
    with pytest.raises(ValueError, match=r"tree_attention: plan has .* expected .*plan_for"):
        run("triton", case, plan=plan, window=9)
    with pytest.raises(ValueError, match="tree_attention: plan has"):
        run("triton", case, causal=True, plan=plan)
    with pytest.raises(
        ValueError, match=r"plan has .*'kv_heads': 2, 'group': 2.* expected .*'kv_heads': 1, 'group': 4"
    ):
        caches = {name: getattr(case, name)[:, :, :1] for name in ("key_cache", "value_cache")}
        run("triton", replace(case, **caches), plan=plan)
    one, other = (run("triton", case, plan=each, batch_invariant=True) for each in (plan, None))
    assert torch.equal(one, other), "shares depend on the batch"
    with pytest.MonkeyPatch.context() as patch, use_backend("triton"):
        patch.setattr(import_module("specdec_kernels.ops.tree_attention.plan"), "MAX_TILES", 8)
        assert plan_for(*case.cache[:2], *case.cache[3:]) is None
        with pytest.raises(ValueError, match=r"room for \d+ tokens a row; expected at most 64 with a plan of 4 blocks"):
            run("triton", case, plan=plan)
    with use_backend("reference"):
        assert plan_for(*case.cache[:2], *case.cache[3:]) is None
        numbers = {"kv_heads": 2, "group": 2, "block_m": 16, "block_n": 64, "programs": 5}
        with pytest.raises(ValueError, match=r"attention_plan: out is torch\.int32 \[3\]"):
            attention_plan(case.lengths, case.offsets, 6, **numbers, out=torch.zeros(3, dtype=torch.int32))
        with pytest.raises(ValueError, match="attention_plan: lengths are"):
            attention_plan(case.lengths[:2], case.offsets, 6, **numbers)
        with pytest.raises(ValueError, match=r"attention_plan: .*programs 0"):
            attention_plan(case.lengths, case.offsets, 6, **numbers | {"programs": 0})


@pytest.mark.parametrize("width", [96, 256])
def test_wide_heads(width: int) -> None:
    case = fenced(build(Shape([9], [70], width=width, dtype=torch.bfloat16)))
    assert (run("triton", case) - run("reference", case)).abs().max() <= TOLERANCE[torch.bfloat16]


def test_a_tree_of_more_than_a_thousand_nodes() -> None:
    case = build(Shape([1100], [37], heads=1, kv_heads=1, page_size=256, deep=True, dtype=torch.bfloat16))
    assert case.ancestors.shape[1] == 35
    assert (run("triton", case) - run("reference", case)).abs().max() <= TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_error_is_at_most_twice_that_of_torch(dtype: torch.dtype) -> None:
    """Against float64, with eager attention in the same dtype as the measure."""
    case = build(Shape([9, 40], [200, 30], dtype=dtype))
    exact_case = build(Shape([9, 40], [200, 30], dtype=torch.float64))
    for name in ("query", "key_cache", "value_cache"):
        getattr(exact_case, name).copy_(getattr(case, name))
    exact, got = run("reference", exact_case), run("triton", case)
    worst = 0.0
    for row, (first, count) in enumerate(((0, 9), (9, 40))):
        length = case.shape.lengths[row] + count
        mask = row_mask(first, count, length - count, case.ancestors, None, 0, torch.device("cpu"))
        at = torch.arange(length)
        slots = case.page_table[row].long()[at // 16] * 16 + at % 16
        key, value = (c.flatten(0, 1)[slots].repeat_interleave(2, 1) for c in (case.key_cache, case.value_cache))
        scores = (case.query[first : first + count].transpose(0, 1) @ key.permute(1, 2, 0)) * 0.125
        eager = (scores.masked_fill(~mask, -torch.inf).softmax(-1) @ value.transpose(0, 1)).transpose(0, 1)
        worst = max(worst, float((eager - exact[first : first + count]).abs().max()))
    assert (got - exact).abs().max() <= 2 * max(worst, torch.finfo(dtype).eps / 4)


def test_a_node_has_the_same_bits_in_any_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """batch_invariant: a chain scored at once equals one node after the other, in any batch."""
    # A matrix unit treats all rows of a block equally; the library of numpy.matmul does not.
    monkeypatch.setattr(
        np, "matmul", lambda a, b, **_: np.einsum("mk,nk->mn", *(x.astype(np.float32) for x in (a, b.T)))
    )
    case = build(Shape([40, 3], [1000, 7], heads=6, kv_heads=2, deep=True, dtype=torch.float16))
    together = run("triton", case, True, batch_invariant=True)

    def alone(first: int, last: int, length: int) -> Tensor:
        offsets = torch.tensor([0, last - first], dtype=torch.int32)
        row = case.page_table[:1], case.lengths[:1] + length, offsets
        with use_backend("triton"):
            inputs = (case.query[first:last], case.key_cache, case.value_cache, *row)
            return tree_attention(*inputs, scale=0.125, batch_invariant=True)

    for count in (1, 18, 40):
        assert torch.equal(alone(0, count, 0), together[:count])
    assert torch.equal(alone(39, 40, 39), together[39:40])


def test_a_node_has_the_same_bits_however_wide_the_page_table_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """batch_invariant: one piece, three, and more than are joined at once; sinks are added where pieces are joined."""
    from specdec_kernels.ops.tree_attention import triton_kernel

    join, tiles = triton_kernel.combine_pieces, []

    class Watched:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **options: tiles.append(options["BLOCK_P"]) or join[grid](*args, **options)

    monkeypatch.setattr(triton_kernel, "combine_pieces", Watched())
    case, sinks = build(Shape([3], [600], width=16, heads=2, kv_heads=1)), torch.tensor([0.3, -1.0])
    want = run("triton", case, batch_invariant=True, sinks=sinks, return_lse=True)
    for pieces in (3, 33):
        missing = pieces * launch.PIECE_SLOTS // case.key_cache.shape[1] - case.page_table.shape[1]
        wide = replace(case, page_table=torch.nn.functional.pad(case.page_table, (0, missing)))
        got = run("triton", wide, batch_invariant=True, sinks=sinks, return_lse=True)
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    assert len(tiles) == 3 and len(set(tiles)) == 1


def test_strides_of_slots_may_exceed_int32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first slot exists; addresses of the others are computed and not read."""
    from specdec_kernels.ops.tree_attention import triton_kernel

    kernel = triton_kernel.attend_pieces
    place = kernel.arg_names.index("key_slot_stride")

    class Far:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **options: kernel[grid](*args[:place], 2**27, *args[place + 1 :], **options)

    case = build(Shape([1], [0], page_size=96))
    want = run("triton", case)
    monkeypatch.setattr(triton_kernel, "attend_pieces", Far())
    assert torch.equal(run("triton", case), want)


def test_an_eight_bit_cache_with_scales() -> None:
    case = build(Shape([7, 2], [70, 5], dtype=torch.bfloat16, heads=4, kv_heads=2))
    narrow = [cache.float().div(4).to(torch.float8_e4m3fn) for cache in (case.key_cache, case.value_cache)]
    scales = {"key_scale": torch.tensor([4.0, 3.0]), "value_scale": torch.tensor([4.0, 5.0])}
    short = replace(case, key_cache=narrow[0], value_cache=narrow[1])
    want = run("reference", short, **scales)
    assert (run("triton", short, **scales) - want).abs().max() <= 4 * TOLERANCE[torch.bfloat16]
    assert (want - run("reference", case)).abs().max() > 0.1, "scales matter"
    with use_backend("cpu"), pytest.raises(UnsupportedError, match="with scales"):
        tree_attention(*short.cache, scale=0.1, **scales)


def test_a_cache_that_is_contiguous_per_row() -> None:
    case = build(Shape([5, 3], [50, 20], page_size=64))
    table = torch.arange(2, dtype=torch.int32)[:, None]
    rows = [torch.stack([cache[case.page_table[row, 0]] for row in range(2)]) for cache in case.cache[1:3]]
    inputs = (case.query, *rows, table, *case.cache[4:], case.ancestors)
    with use_backend("triton"):
        got = tree_attention(*inputs, scale=0.125)
    assert (got - run("reference", case)).abs().max() <= TOLERANCE[torch.float32]


def test_strided_queries_and_the_caller_s_memory() -> None:
    case = build(Shape([3], [600]))
    query = torch.randn(3, 8 * 64)[:, : 4 * 64].view(3, 4, 64)
    out = torch.empty(3, 4, 128)[:, :, :64]
    with use_backend("triton"):
        size = tree_attention.workspace_size(query, *case.cache[1:], scale=0.1)
    workspace = guarded(torch.full((size,), 255, dtype=torch.uint8))  # not a number, wherever it is read
    given = {"scale": 0.1, "out": out, "workspace": workspace}
    with use_backend("triton"):
        result = tree_attention(query, *case.cache[1:], case.ancestors, **given)
        for wrong in (workspace[16:], workspace.to("meta")):
            with pytest.raises(ValueError, match=r"workspace is .* expected contiguous torch.uint8 .* or more on cpu"):
                tree_attention(query, *case.cache[1:], case.ancestors, **given | {"workspace": wrong})
    with use_backend("reference"):
        want = tree_attention(query.contiguous(), *case.cache[1:], case.ancestors, scale=0.1)
    assert size > 0 and result.data_ptr() == out.data_ptr()
    assert (out - want).abs().max() <= TOLERANCE[torch.float32]


def test_results_are_contiguous_for_any_query_and_written_to_out() -> None:
    """As the fake kernel declares, also for a transposed query [H, M, D]; lse is written in place."""
    case = build(Shape([3], [20]))
    query = case.query.transpose(0, 1).contiguous().transpose(0, 1)
    made = {}
    for backend in ("reference", "triton", "cpu", "sdpa"):
        made[backend] = run(backend, replace(case, query=query))
        assert made[backend].is_contiguous() and (made[backend] - made["reference"]).abs().max() <= 3e-6
    want = run("triton", case, return_lse=True)
    out, lse = torch.empty_like(want[0]), torch.empty_like(want[1])
    found = launch.tree_attention(
        *case.cache, case.ancestors, case.depth, scale=case.shape.width**-0.5, out=out, lse=lse, return_lse=True
    )
    assert found[0] is out and found[1] is lse and torch.equal(lse, want[1])


def test_page_ids_beyond_the_cache_do_not_read_beyond_it() -> None:
    case = fenced(build(Shape([3], [20])))
    case.page_table[0, 1] = 99
    run("triton", case)
    case.page_table[0, 1] = -5
    run("triton", case)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"query": torch.zeros(3, 3, 64)}, "3 heads"),
    ({"lengths": torch.tensor([20])}, "expected int32"),
    ({"query": torch.zeros(3, 4, 32)}, "expected torch.float32 .pages, page_size, kv_heads, 32."),
    ({"offsets": torch.tensor([0, 1, 3], dtype=torch.int32)}, "offsets is"),
    ({"query": torch.zeros(3, 4, 128)[:, :, ::2]}, "strided last axis"),
    ({"query": torch.zeros(3, 4, 64, dtype=torch.float64)}, "served are float32"),
    ({"ancestors": torch.zeros(2, 1, dtype=torch.int32)}, "ancestors is"),
    ({"query": torch.zeros(3, 256)}, r"query is torch.float32 \[3, 256\], expected \[nodes, heads, width\]"),
    ({"depth": torch.zeros(1, dtype=torch.int32).expand(3)}, "depth is .* with a contiguous last axis"),
    ({"page_table": torch.ones(1, 8, dtype=torch.int32)[:, ::2]}, "page_table is .* with a contiguous last axis"),
    ({"key_cache": torch.zeros(9, 16, 2, 64, device="meta")}, "key_cache is on meta; expected cpu like query"),
    ({"sinks": torch.zeros(2)}, r"sinks is torch.float32 \[2\] on cpu, expected contiguous float32 \[4\]"),
    ({"sinks": torch.zeros(4, dtype=torch.int32)}, "sinks is torch.int32"),
    ({"sinks": torch.zeros(8)[::2]}, "sinks is .* one per query head"),
    ({"key_scale": torch.ones(2)}, "go together"),
    ({"key_scale": torch.ones(2), "value_scale": torch.ones(4)}, r"value_scale is .* contiguous float32 \[2\]"),
    ({"key_scale": torch.ones(2).half(), "value_scale": torch.ones(2)}, "key_scale is torch.float16"),
]


@pytest.mark.parametrize(("change", "words"), BAD, ids=[b[1] for b in BAD])
def test_bad_arguments_raise_clear_errors(change: dict[str, Tensor], words: str) -> None:
    case = build(Shape([3], [20]))
    names = ("query", "key_cache", "value_cache", "page_table", "lengths", "offsets", "ancestors")
    values = [change.get(n, v) for n, v in zip(names, (*case.cache, case.ancestors), strict=True)]
    options = {name: value for name, value in change.items() if name not in names}
    with use_backend("triton"), pytest.raises(ValueError, match=f"(?s)tree_attention.*{words}"):
        tree_attention(*values, scale=0.1, **options)
