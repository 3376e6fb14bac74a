"""Quantized layers that packed passes cannot serve: those in which the tokens of a pass depend on each other.

Some layers scale the activations of all tokens by the largest of them. Layers of bitsandbytes with 8 bits compute the
columns in which any token of the pass has a large activation in higher precision. In both, a token's result depends on
the other requests and branches. Layers with a scale per token, and layers that quantize weights alone, are served.
Tests: tests/loading/test_quantized.py.
"""

from __future__ import annotations

from typing import Any

_DYNAMIC = "torch.ao.nn.quantized.dynamic"


def why_tokens_depend(model: Any) -> str | None:
    """Returns why the tokens of a pass depend on each other in a quantized layer, with a remedy, or None.

    Args:
        model: A transformers model, quantized or not.
    """
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")  # the attribute may be a property that computes it
        scales = getattr(getattr(weight, "act_quant_kwargs", None), "granularity", None)
        is_shared = type(scales).__name__ == "PerTensor" and getattr(weight, "act_quant_scale", None) is None
        if is_shared or type(module).__module__.startswith(_DYNAMIC):
            return (
                f"{name} quantizes the activations of all tokens with one scale, so a row's text would depend on "
                "its neighbours; expected one scale per token; quantize the weights alone (torchao's "
                "Int8WeightOnlyConfig)"
            )
        threshold = getattr(getattr(module, "state", None), "threshold", 0.0)
        if type(module).__name__ == "Linear8bitLt" and threshold > 0:
            return (
                f"{name} selects columns by the largest activation of all tokens (llm_int8_threshold {threshold:g}), "
                "so a row's text would depend on its neighbours; expected a threshold of 0; load the model with "
                "BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)"
            )
    return None
