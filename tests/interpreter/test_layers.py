"""The attention function of targets on Triton kernels: one plan per pass and kind of layer, and the reference's
results.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from oracles.packed_trees import Shape, build

from specdec_fast.interfaces import Slots
from specdec_fast.targets import attention
from specdec_kernels import attention_plan, use_backend


def test_layers_of_a_kind_share_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four layers, two of them with a window; rows of different lengths, one without nodes."""
    case = build(Shape([5, 0, 9], [70, 3, 200], deep=True))
    at = torch.cat([case.lengths[row] + torch.arange(n) for row, n in enumerate(case.shape.counts)])
    rows = torch.tensor([0] * 5 + [2] * 9)
    slots = case.page_table.long()[rows, at // 16] * 16 + at % 16
    where = Slots(case.page_table, case.lengths, case.offsets, slots, at, case.ancestors, case.depth)
    made: list[dict[str, Any]] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        made.append(kwargs)
        return attention_plan(*args, **kwargs)

    monkeypatch.setitem(attention.plan_for.__globals__, "attention_plan", counted)
    query, key, value = (torch.randn(1, heads, 14, 64) for heads in (4, 2, 2))
    results = {}
    for backend in ("reference", "triton"):
        caches = [case.key_cache.clone() for _ in range(4)], [case.value_cache.clone() for _ in range(4)]
        packed = attention.PackedContext(where, *caches)
        with use_backend(backend):
            results[backend] = [
                attention.attend(
                    SimpleNamespace(layer_idx=layer), query, key, value, None, sliding_window=window, packed=packed
                )[0]
                for layer, window in enumerate((None, 30, None, 30))
            ]
    assert [kwargs["window"] for kwargs in made] == [0, 30]
    for want, got in zip(results["reference"], results["triton"], strict=True):
        assert (got - want).abs().max() <= 3e-6
    assert (results["triton"][0] - results["triton"][1]).abs().max() > 1e-3, "the window matters"
