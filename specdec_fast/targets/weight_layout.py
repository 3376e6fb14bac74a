"""Linear layers on a CPU: how their weights lie in memory and what multiplies them. Tests:
tests/targets/test_weight_layout.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specdec_kernels import UnsupportedError, row_linear

__all__ = ["RowLinear", "store_by_input"]


class RowLinear(torch.nn.Linear):
    """A linear layer by `row_linear`, so that a token gets the same bits alone and beside others: in float32 on a CPU,
    where nothing is recorded for a backward pass. Elsewhere it is what it was.
    """

    product: Callable[..., Tensor]
    """The operator's backend itself: a pass of one token through many small layers feels every look-up on the way."""

    def forward(self, input: Tensor) -> Tensor:
        served = input.is_cpu and input.dtype == self.weight.dtype == torch.float32
        if served and not torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu"):
            return RowLinear.product(input, self.weight, self.bias)
        return super().forward(input)


def store_by_input(model: torch.nn.Module) -> None:
    """Lay the weights of all linear layers out with the outputs of one input side by side, in place. Idempotent.

    Values, shapes and names stay; strides become (1, outputs). A product of few rows, which is all that decoding does,
    is then a sum of whole stored vectors: less time for few rows. A weight that is an embedding too is looked up by row
    and stays as it is, and so does one that is no plain tensor. Layers in float32 become `RowLinear` where the compiled
    operator is there and wanted.
    """
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    for module in model.modules():
        if type(module) is torch.nn.Linear and type(module.weight.data) is Tensor:
            if id(module.weight) not in embeddings:
                module.weight.data = module.weight.data.t().contiguous().t()
            product = _compiled(module.weight) if module.weight.dtype == torch.float32 else None
            if product is not None:
                RowLinear.product = product
                module.__class__ = RowLinear


def _compiled(weight: Tensor) -> Callable[..., Tensor] | None:
    try:
        name, product = row_linear.bound(weight[:1], weight)
    except UnsupportedError:  # another backend is wished for everywhere
        return None
    return product if name == "cpu" else None
