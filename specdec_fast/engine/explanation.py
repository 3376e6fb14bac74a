"""How a target computes its passes, in words. Tests: tests/engine/test_explanation.py."""

from __future__ import annotations

from typing import Any

import torch

from specdec_fast.interfaces import Target


def is_fused(target: Target) -> bool | None:
    """Returns whether passes run as one operator. None if the target does not say."""
    return target.why_not_fused is None if hasattr(target, "why_not_fused") else None


def weight_storage(model: Any) -> str:
    """Returns how quantized linear layers store their weights, such as "int8"; "" if none is quantized.

    Args:
        model: A PyTorch model, or None.
    """
    found: dict[str, None] = {}
    for module in model.modules() if isinstance(model, torch.nn.Module) else ():
        size = getattr(module, "in_features", 0) * getattr(module, "out_features", 0)
        tensors = [each for each in (*module._parameters.values(), *module._buffers.values()) if each is not None]
        if size and tensors and (name := _quantized_dtype(max(tensors, key=_stored_bytes), size)):
            found[name] = None
    return " and ".join(found)


def _quantized_dtype(weight: Any, size: int) -> str:
    """Returns the type of a quantized weight with `size` elements; "" for one that is not quantized."""
    if (kind := getattr(weight, "quant_type", None)) is not None:  # nf4 or fp4 of bitsandbytes
        return str(kind)
    if (dtype := getattr(weight, "target_dtype", None)) is not None:  # torchao's, stored in more bits
        return str(dtype).removeprefix("torch.")
    stored = max(_inner(weight), key=_stored_bytes)
    if stored.dtype.is_floating_point:
        return str(stored.dtype).removeprefix("torch.") if stored.dtype.itemsize == 1 else ""
    return f"int{round(8 * stored.nbytes / size)}"


def _inner(weight: Any) -> list[torch.Tensor]:
    """Returns the plain tensors of which a subclass of tensors consists."""
    if not hasattr(weight, "__tensor_flatten__"):
        return [weight]
    return [each for name in weight.__tensor_flatten__()[0] for each in _inner(getattr(weight, name))]


def _stored_bytes(weight: Any) -> int:
    return sum(each.nbytes for each in _inner(weight))


def explain_budget(drafter: str, budget: Any) -> str:
    """Returns the name of a drafter with that of its budget, unless this is fixed or there is no drafter."""
    name = getattr(budget, "name", type(budget).__name__)
    return drafter if drafter == "none" or name == "fixed" else f"{drafter} with budget {name}"


def explain_passes(target: Target) -> str:
    """Returns the dtype and device of a target's passes, and whether they are fused, with the reason.

    Of quantized weights it says how they are stored too.
    """
    model: Any = getattr(target, "model", None)
    dtype = str(getattr(model, "dtype", "")).removeprefix("torch.")
    if stored := weight_storage(model):
        dtype = f"{stored} weights, {dtype} computation"
    place = " on ".join(filter(None, (dtype, str(getattr(target, "device", "")))))
    fused, reason = is_fused(target), getattr(target, "why_not_fused", None)
    return place if fused is None else f"{place}, fused" if fused else f"{place}, not fused: {reason}"
