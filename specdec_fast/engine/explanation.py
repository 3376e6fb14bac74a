"""How a target computes its passes, in words. Tests: tests/engine/test_explanation.py."""

from __future__ import annotations

from typing import Any

from specdec_fast.interfaces import Target


def is_fused(target: Target) -> bool | None:
    """Returns whether passes run as one operator. None if the target does not say."""
    return target.why_not_fused is None if hasattr(target, "why_not_fused") else None


def explain_passes(target: Target) -> str:
    """Returns the dtype and device of a target's passes, and whether they are fused, with the reason."""
    model: Any = getattr(target, "model", None)
    dtype = str(getattr(model, "dtype", "")).removeprefix("torch.")
    place = " on ".join(filter(None, (dtype, str(getattr(target, "device", "")))))
    fused, reason = is_fused(target), getattr(target, "why_not_fused", None)
    return place if fused is None else f"{place}, fused" if fused else f"{place}, not fused: {reason}"
