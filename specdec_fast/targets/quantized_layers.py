"""Quantized layers that packed passes cannot serve: those whose activations share one scale.

Such a layer scales the activations of all tokens of a pass by the largest of them, so a token's result depends on the
other requests and branches. Layers with a scale per token, and layers that quantize weights alone, are served.
Tests: tests/loading/test_quantized.py.
"""

from __future__ import annotations

from typing import Any

_DYNAMIC = "torch.ao.nn.quantized.dynamic"


def find_shared_scale(model: Any) -> str | None:
    """Returns the name of a layer that scales the activations of all tokens together, or None.

    Args:
        model: A transformers model, quantized by torch.ao or torchao or not at all.
    """
    for name, module in model.named_modules():
        if type(module).__module__.startswith(_DYNAMIC):
            return name
        weight = getattr(module, "weight", None)
        scales = getattr(getattr(weight, "act_quant_kwargs", None), "granularity", None)
        if type(scales).__name__ == "PerTensor" and getattr(weight, "act_quant_scale", None) is None:
            return name
    return None
