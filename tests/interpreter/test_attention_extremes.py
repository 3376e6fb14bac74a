"""Scores beyond all numbers in the Triton attention: what the reference makes of them, in every way keys are cut."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from specdec_kernels import AttentionPlan, plan_for, tree_attention, tree_plan, use_backend
from specdec_kernels.samples import int32
from specdec_kernels.tree_attention import launch

LENGTH, NODES = 140, 3
WAYS = ("pieces", "one piece", "fixed pieces", "shares")


def attend(way: str, case: tuple[Any, ...], plan_of: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> Any:
    options: dict[str, Any] = {"batch_invariant": way == "fixed pieces"}
    if way == "one piece":
        monkeypatch.setattr(launch, "pieces", lambda *_: 1)
    launch._cut.cache_clear()
    if way == "shares":
        monkeypatch.setattr(launch, "_processors", lambda _: 1)
        monkeypatch.setattr(launch, "resident", lambda _: 3)
        options["plan"] = plan_for(*plan_of)
        assert isinstance(options["plan"], AttentionPlan)
    found = tree_attention(*case, scale=0.2, return_lse=True, **options)
    monkeypatch.undo()
    launch._cut.cache_clear()
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("slots", [range(5, 6), range(64), range(128), range(70, 143), range(143)], ids=str)
@pytest.mark.parametrize("score", [-math.inf, math.inf, math.nan], ids=str)
def test_scores_beyond_all_numbers(way: str, slots: range, score: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Single keys, whole tiles of them, the tree's own, and all there are."""
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
    if score != math.inf:  # then what the log of the sum is says nothing more
        torch.testing.assert_close(lse, want_lse, atol=1e-5, rtol=1e-4, equal_nan=True)
    else:
        assert not bool(lse.isfinite()[want_lse == math.inf].any())
