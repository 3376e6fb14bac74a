"""Int8 weights of linear layers: a model that decodes from a quarter of its bytes and computes something else.

The quantized model is a model of its own. Decoding is lossless with respect to it, not to the one that was loaded.

Tests: tests/targets/test_int8_weights.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec_fast.targets.sharding import why_not_whole
from specdec_kernels import batch_invariant_linear_int8, quantize_int8

__all__ = ["Int8Linear", "QuantizedSize", "quantize_linear_layers"]


class Int8Linear(torch.nn.Module):
    """A linear layer with int8 weights and one scale per output, for inference on a CPU.

    Activations are not quantized. A row has the same bits in every batch (`batch_invariant_linear_int8`).

    Args:
        layer: The layer whose weight is rounded. It stays as it is.
    """

    values: Tensor
    scale: Tensor

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__()
        values, scale = quantize_int8(layer.weight)
        self.register_buffer("values", values)
        self.register_buffer("scale", scale)
        self.bias = layer.bias
        self.out_features, self.in_features = values.shape
        self.dtype = layer.weight.dtype
        # called directly: look-ups cost time in passes of one token through small layers
        some = torch.zeros(1, self.in_features, dtype=self.dtype)
        self.product: Callable[..., Tensor] = batch_invariant_linear_int8.bind_backend(some, values, scale)[1]

    @property
    def weight(self) -> Tensor:
        """The weight as floats, computed anew at every access: [outputs, inputs]."""
        return (self.values.float() * self.scale[:, None]).to(self.dtype)

    def forward(self, input: Tensor) -> Tensor:
        """Returns the outputs [..., outputs] of [..., inputs]."""
        if torch.is_grad_enabled() and input.requires_grad:
            return torch.nn.functional.linear(input, self.weight.to(input.dtype), self.bias)
        out: Tensor = self.product(input, self.values, self.scale, self.bias)
        return out

    def extra_repr(self) -> str:
        """Returns the sizes, as `torch.nn.Linear` shows them."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


@dataclass(frozen=True)
class QuantizedSize:
    """What quantization changed.

    Attributes:
        layers: Number of linear layers.
        before: Bytes of their weights before.
        after: Bytes of their weights after, with scales.
    """

    layers: int
    before: int
    after: int


def quantize_linear_layers(model: torch.nn.Module) -> QuantizedSize:
    """Replaces every `torch.nn.Linear` of a model by an `Int8Linear`, the projection to logits included.

    A projection that shares its weight with the embedding gets an int8 copy, and the embedding keeps its values: one
    row of it is read per token. Layers of other types, such as the experts of a mixture in one tensor, stay unchanged.

    Args:
        model: A model on a CPU, in float32, bfloat16 or float16. It is changed in place.

    Returns:
        What changed.

    Raises:
        ValueError: If the model has no such layer, is quantized, is not on a CPU or has another dtype. It is then
            unchanged.
    """
    if (reason := why_not_whole(model)) is not None:
        raise ValueError(f"weights: got 'int8' and {type(model).__name__}: {reason}; leave weights out")
    places = [
        (parent, name, layer)
        for parent in model.modules()
        for name, layer in parent._modules.items()  # named_children leaves out the second place of a layer
        if type(layer) is torch.nn.Linear
    ]
    if any(type(layer.weight.data) is not Tensor for _, _, layer in places):
        raise ValueError(
            f"weights: got 'int8' and {type(model).__name__} with quantized layers; expected float weights; leave "
            "weights out"
        )
    if not places:
        raise ValueError(
            f"weights: got 'int8' and {type(model).__name__}, which has no torch.nn.Linear; leave weights out"
        )
    for _, name, layer in places:
        if layer.weight.device.type != "cpu":
            where = layer.weight.device
            raise ValueError(f"weights: got 'int8' and {name} on {where}; expected the CPU; pass device='cpu'")
        if layer.weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(
                f"weights: got 'int8' and {name} in {layer.weight.dtype}; expected a float model; pass dtype='float32'"
            )
    made: dict[int, Int8Linear] = {}  # a layer in two places stays one layer
    for _, _, layer in places:
        if id(layer) not in made:
            made[id(layer)] = Int8Linear(layer)
    for parent, name, layer in places:
        setattr(parent, name, made[id(layer)])
    unique = {id(layer): layer for _, _, layer in places}.values()
    return QuantizedSize(
        len(made),
        sum(layer.weight.nbytes for layer in unique),
        sum(each.values.nbytes + each.scale.nbytes for each in made.values()),
    )
