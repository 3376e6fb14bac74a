"""Extremes of the Triton attention, for every split of the keys: infinite scores, wide heads, 8-bit caches."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from interpreter.test_tree_attention import TOLERANCE, fenced
from oracles.packed_trees import Batch, Shape, build

from specdec_kernels import AttentionPlan, plan_for, tree_attention, tree_plan, use_backend
from specdec_kernels.ops.tree_attention import launch
from specdec_kernels.testing.samples_attention import int32

LENGTH, NODES = 140, 3
WAYS = ("pieces", "one piece", "fixed pieces", "shares")


def attend(
    way: str, case: tuple[Any, ...], plan_of: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch, **more: Any
) -> Any:
    options: dict[str, Any] = {"batch_invariant": way == "fixed pieces", "scale": 0.2, **more}
    if way == "one piece":
        monkeypatch.setattr(launch, "choose_pieces", lambda *_: 1)
    launch._partition.cache_clear()
    if way == "shares":
        monkeypatch.setattr(launch, "_num_processors", lambda _: 1)
        monkeypatch.setattr(launch, "programs_per_processor", lambda _: 3)
        options["plan"] = plan_for(*plan_of, window=options.get("window", 0))
        assert isinstance(options["plan"], AttentionPlan)
    found = tree_attention(*case, return_lse=True, **options)
    monkeypatch.undo()
    launch._partition.cache_clear()
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("slots", [range(5, 6), range(64), range(128), range(70, 143), range(143)], ids=str)
@pytest.mark.parametrize("score", [-math.inf, math.inf, math.nan], ids=str)
def test_infinite_scores(way: str, slots: range, score: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Single keys, whole tiles, the tree's own keys, and all keys."""
    source = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(10, 16, 1, 32, generator=source) for _ in range(2))
    keys.view(160, 32)[[16 + slot for slot in slots]] = score
    query = torch.rand(NODES, 2, 32, generator=source) + 0.1
    table, lengths, offsets = int32([list(range(1, 10))]), int32([LENGTH]), int32([0, NODES])
    plan = tree_plan(int32([-1, 0, 0]), offsets)
    case = (query, keys, values, table, lengths, offsets, plan.ancestors, plan.depth)
    with use_backend("reference"):
        want, want_lse = tree_attention(*case, scale=0.2, return_lse=True)
    with use_backend("triton"):
        out, lse = attend(way, case, case[:2] + case[3:7], monkeypatch)
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-4, equal_nan=True)
    if score != math.inf:  # then the log of the sum has no meaning
        torch.testing.assert_close(lse, want_lse, atol=1e-5, rtol=1e-4, equal_nan=True)
    else:
        assert not bool(lse.isfinite()[want_lse == math.inf].any())


OPTIONS = ({}, {"softcap": 2.0, "window": 40})


def narrowed(case: Batch) -> tuple[Batch, dict[str, torch.Tensor]]:
    """The batch with a cache in float8_e4m3fn, and its scales."""
    caches = [cache.float().div(4).to(torch.float8_e4m3fn) for cache in (case.key_cache, case.value_cache)]
    scales = {"key_scale": torch.tensor([4.0, 3.0]), "value_scale": torch.tensor([4.0, 5.0])}
    return replace(case, key_cache=caches[0], value_cache=caches[1]), scales


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(
    ("dtype", "width", "narrow", "counts"),
    [
        (torch.float32, 256, False, [5, 20]),
        (torch.float32, 96, False, [20, 1]),
        (torch.bfloat16, 256, False, [1, 40]),
        (torch.float16, 96, False, [70, 0]),
        (torch.bfloat16, 64, True, [3, 40]),
        (torch.bfloat16, 96, True, [70, 2]),
        (torch.float16, 256, True, [9, 1]),
        (torch.float32, 128, True, [5, 0]),
    ],
)
def test_wide_heads_and_narrow_caches(
    way: str, options: dict[str, Any], dtype: torch.dtype, width: int, narrow: bool, counts: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Trees and prefills. A float8 cache is exact in every dtype of the products."""
    causal = bool(options)
    case = build(Shape(counts, [70, 130], dtype=dtype, width=width, heads=4, kv_heads=2))
    scales: dict[str, torch.Tensor] = {}
    case, scales = narrowed(case) if narrow else (fenced(case), scales)
    tree = () if causal else (case.ancestors, case.depth)
    given = {**options, **scales, "scale": width**-0.5, "sinks": torch.tensor([0.5, -1.0, 0.0, 2.0])}
    with use_backend("reference"):
        want, want_lse = tree_attention(*case.cache, *tree, return_lse=True, **given)
    with use_backend("triton"):
        plan_of = (*case.cache[:2], *case.cache[3:], *tree[:1])
        out, lse = attend(way, (*case.cache, *tree), plan_of, monkeypatch, **given)
    assert (out - want).abs().max() <= (4 if narrow else 1) * TOLERANCE[dtype] and out.dtype == want.dtype
    torch.testing.assert_close(lse, want_lse, atol=2e-5 if dtype == torch.float32 else 2e-3, rtol=1e-4)
