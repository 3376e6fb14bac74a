"""The Triton steps of the ladder to tree attention, in Triton's interpreter: values, memory and costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.educational_ladder import SOURCES, module, on_path  # noqa: F401
from oracles.interpreter import guarded, watched
from torch import Tensor

from specdec_kernels import plan_for, tree_attention, use_backend

pytest.importorskip("triton")
STEPS = [name for name, text in SOURCES.items() if "import triton\n" in text and "\ndef tree_attention(" in text]
"""The Triton steps, and variants that are put beside them."""
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def fenced(batch: Any) -> Any:
    """Copies a batch into memory that ends with its tensors; slots that no node may read are NaN."""
    pages, page_size = batch.key_cache.shape[:2]
    used = torch.zeros(pages, page_size, dtype=torch.bool)
    for row, (length, count) in enumerate(zip(batch.lengths.tolist(), batch.offsets.diff().tolist())):
        at = torch.arange(length + count if count else 0)
        used[batch.page_table[row].long()[at // page_size], at % page_size] = True
    made = {name: guarded(value) for name, value in batch._asdict().items()}
    for name in ("key_cache", "value_cache"):
        made[name][~used] = torch.nan
    return batch._replace(**made)


@st.composite
def batches(draw: st.DrawFn) -> Any:
    counts = draw(st.lists(st.sampled_from([0, 1, 5, 17, 40]), min_size=1, max_size=3).filter(any))
    kind = draw(st.sampled_from(["chain", "star", "any"]))
    trees = []
    for count in counts:
        parents = {"chain": lambda node: node - 1, "star": lambda node: 0}.get(kind)
        trees.append([(parents(n) if parents else draw(st.integers(0, n - 1))) if n else -1 for n in range(count)])
    heads, kv_heads = draw(st.sampled_from([(1, 1), (2, 1), (4, 2)]))
    dtype = draw(st.sampled_from(list(TOLERANCE)))
    batch = module("worked_example").pack(
        trees, [draw(st.sampled_from([0, 1, 63, 64, 150])) for _ in trees], heads=heads, kv_heads=kv_heads,
        width=draw(st.sampled_from([8, 20, 64])), page_size=draw(st.sampled_from([1, 4, 16, 64])), dtype=dtype,
        tail=draw(st.sampled_from([0, 2])),
    )  # fmt: skip
    seed = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    noise = {
        name: torch.randn(getattr(batch, name).shape, generator=seed).to(dtype)
        for name in ("query", "key_cache", "value_cache")
    }
    return fenced(batch._replace(**noise))


def assert_same(got: Tensor, batch: Any) -> None:
    want = module("worked_example").operator(batch)
    assert got.dtype == want.dtype and not got.isnan().any()
    assert (got - want).abs().max() <= TOLERANCE[want.dtype]


@pytest.mark.parametrize("name", STEPS)
@settings(max_examples=10, deadline=None)
@given(batch=batches())
def test_a_step_equals_the_operator(name: str, batch: Any) -> None:
    scale = module("worked_example").scale_of(batch)
    with watched():
        got = module(name).tree_attention(*batch, scale=scale)
    assert_same(got, batch)


@settings(max_examples=12, deadline=None)
@given(batch=batches(), pieces=st.sampled_from([2, 3, 8]))
def test_any_number_of_pieces_equals_the_operator(batch: Any, pieces: int) -> None:
    """Eight pieces are more than there are tiles, so that some are empty."""
    scale = module("worked_example").scale_of(batch)
    with watched():
        got = module("step5_split_k").tree_attention(*batch, scale=scale, pieces=pieces)
    assert_same(got, batch)


def test_the_number_of_pieces_fills_the_gpu() -> None:
    choose = module("step5_split_k").choose_pieces
    assert choose(programs=32, most_keys=4096) == 8
    assert choose(programs=32, most_keys=1024) == 4, "four tiles or more each"
    assert choose(programs=1, most_keys=10**6) == 32 and choose(programs=500, most_keys=10**6) == 1
    step, example = module("step5_split_k"), module("worked_example")
    batch = example.pack([[-1, 0, 1]], [600], heads=2, kv_heads=1, width=16, page_size=16)
    shapes = []
    with pytest.MonkeyPatch.context() as patch:
        attend = step.attend
        patch.setattr(step, "attend", lambda *given, **named: shapes.append(named["pieces"]) or attend(*given, **named))
        got = step.tree_attention(*batch, scale=0.25)
    assert shapes == [2] and (got - example.operator(batch)).abs().max() < 3e-6


@contextmanager
def counted(**tensors: tuple[Tensor, ...]) -> Iterator[Counter[str]]:
    """Counts bytes that kernels load from and store to groups of tensors, and FLOPs of their matrix products."""
    import triton.runtime.interpreter as interpreter

    builder, found = interpreter.InterpreterBuilder, Counter()
    load, store, dot = builder.create_masked_load, builder.create_masked_store, builder.create_dot

    def count(pointers: Any, mask: Any) -> None:
        wanted = pointers.data[np.broadcast_to(mask.data, pointers.data.shape).astype(bool)]
        size = pointers.get_element_ty().primitive_bitwidth // 8
        for name, group in tensors.items():
            for tensor in group:
                begin = np.uint64(tensor.data_ptr())
                end = begin + np.uint64(tensor.untyped_storage().nbytes())
                found[name] += int(((wanted >= begin) & (wanted < end)).sum()) * size

    def create_masked_load(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        count(ptrs, mask)
        return load(self, ptrs, mask, *rest)

    def create_masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        count(ptrs, mask)
        return store(self, ptrs, value, mask, *rest)

    def create_dot(self: Any, left: Any, right: Any, *rest: Any) -> Any:
        found["flops"] += 2 * left.data.shape[0] * left.data.shape[1] * right.data.shape[1]
        return dot(self, left, right, *rest)

    changes = {"create_masked_load": create_masked_load, "create_masked_store": create_masked_store}
    with pytest.MonkeyPatch.context() as patch:
        for name, changed in {**changes, "create_dot": create_dot}.items():
            patch.setattr(builder, name, changed)
        yield found


def measured() -> tuple[Any, Any]:
    """Returns a ragged batch and its shapes: a request within one share of a plan, a two-block tree, a long chain."""
    example, traffic = module("worked_example"), module("traffic")
    trees, lengths = [[-1, 0, 0, 1], example.binary_tree(20), [*range(-1, 7)]], [10, 100, 690]
    kind = {"heads": 4, "kv_heads": 2, "width": 40}
    batch = example.pack(trees, lengths, page_size=4, **kind)
    return batch, [traffic.Request(tree, length, itemsize=4, **kind) for tree, length in zip(trees, lengths)]


def test_costs_of_the_triton_steps_equal_their_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, shapes = measured()
    scale, step, traffic = module("worked_example").scale_of(batch), module("step5_split_k"), module("traffic")
    caches = batch.key_cache, batch.value_cache
    with counted(cache=caches) as found:
        module("step4_triton").tree_attention(*batch, scale=scale)
    cost = traffic.triton_kernel(shapes)
    assert (found["cache"], found["flops"]) == (cost.cache_bytes, cost.flops)

    parts: list[Tensor] = []
    attend = step.attend
    monkeypatch.setattr(step, "attend", lambda *given, **named: parts.extend(attend(*given, **named)) or tuple(parts))
    with counted(cache=caches) as found:
        step.tree_attention(*batch, scale=scale, pieces=3)
    cost = traffic.split_k(shapes, pieces=3)
    assert (found["cache"], found["flops"]) == (cost.cache_bytes, cost.flops)
    assert cost.scratch_bytes == 2 * sum(part.numel() * part.element_size() for part in parts)


@pytest.mark.parametrize("planned", [False, True])
def test_costs_of_the_shipped_kernel_equal_their_counts(planned: bool) -> None:
    batch, shapes = measured()
    traffic = module("traffic")
    cost = traffic.shipped_plan(shapes) if planned else traffic.shipped_pieces(shapes)
    with use_backend("triton"):
        query, keys, _, table, lengths, offsets, ancestors = batch
        plan = plan_for(query, keys, table, lengths, offsets, ancestors) if planned else None
        size = tree_attention.workspace_size(*batch, scale=1.0, plan=plan)
        workspace = torch.empty(size, dtype=torch.uint8)
        with counted(cache=(batch.key_cache, batch.value_cache), scratch=(workspace,)) as found:
            tree_attention(*batch, scale=1.0, plan=plan, workspace=workspace)
    assert (found["cache"], found["flops"]) == (cost.cache_bytes, cost.flops)
    assert found["scratch"] == cost.scratch_bytes > 0
