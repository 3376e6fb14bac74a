"""Linear layers: on a CPU how weights lie in memory and what multiplies them, on a GPU where rows of logits begin.

Tests: tests/targets/test_linear_layers.py, tests/launch/test_aligned_logits.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from specdec_kernels import UnsupportedError, batch_invariant_linear

__all__ = ["AlignedLogits", "BatchInvariantLinear", "align_logits", "store_by_input"]


_INSTRUCTIONS = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}


@cache
def has_instructions(dtype: torch.dtype) -> bool:
    """Whether torch multiplies this half precision by the processor's own instructions. Without them (AVX2) it takes
    several times as long as `batch_invariant_linear`, and longer still where weights are stored by input.
    """
    asked = getattr(torch.ops.mkldnn, _INSTRUCTIONS[dtype], None) if dtype in _INSTRUCTIONS else None
    return asked is None or bool(asked())


def is_ours(dtype: torch.dtype) -> bool:
    """Whether `batch_invariant_linear` multiplies in this dtype, where it is there."""
    return dtype == torch.float32 or not has_instructions(dtype)


class BatchInvariantLinear(torch.nn.Linear):
    """A linear layer by `batch_invariant_linear`, so that a token gets the same bits alone and beside others: on a
    CPU, in float32 and in half precisions that torch is slow in, where nothing is recorded for a backward pass.
    Elsewhere it is what it was.
    """

    product: Callable[..., Tensor]
    """The operator's backend itself: a pass of one token through many small layers feels every look-up on the way."""

    def forward(self, input: Tensor) -> Tensor:
        served = input.is_cpu and input.dtype == self.weight.dtype and is_ours(input.dtype)
        if served and not torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu"):
            return BatchInvariantLinear.product(input, self.weight, self.bias)
        return super().forward(input)


def store_by_input(model: torch.nn.Module) -> None:
    """Lay the weights of all linear layers out with the outputs of one input side by side, in place. Idempotent.

    Values, shapes and names stay; strides become (1, outputs). A product of few rows, which is all that decoding does,
    is then a sum of whole stored vectors: less time for few rows. A weight that is an embedding too is looked up by row
    and stays as it is, and so does one that is no plain tensor. Layers become `RowLinear` where that is faster and the
    compiled operator is there and wanted; where it would be, and is not, weights in half precision stay as they are.
    """
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    for module in model.modules():
        if type(module) is torch.nn.Linear and type(module.weight.data) is Tensor:
            dtype = module.weight.dtype
            product = _compiled(module.weight) if is_ours(dtype) else None
            slow = product is None and not has_instructions(dtype)
            if id(module.weight) not in embeddings and not slow and module.weight.stride(0) != 1:
                module.weight.data = module.weight.data.t().contiguous().t()
            if product is not None:
                BatchInvariantLinear.product = product
                module.__class__ = BatchInvariantLinear


def _compiled(weight: Tensor) -> Callable[..., Tensor] | None:
    try:
        name, product = batch_invariant_linear.bind_backend(weight[:1], weight)
    except UnsupportedError:  # another backend is wished for everywhere
        return None
    return product if name == "cpu" else None


ROW = 16
"""Elements: rows that begin at multiples of it can be read 16 bytes at a time, in every dtype."""


class AlignedLogits(torch.nn.Linear):
    """A projection to logits whose rows begin at multiples of 16 elements on a GPU, whatever the vocabulary.

    Kernels then read rows by wide loads. Rows end in memory that nothing reads. Where something is recorded for a
    backward pass, under autocast and in compiled code it is what it was.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Returns the logits [..., outputs] of hidden states [..., inputs], with a row stride that 16 divides."""
        plain = not input.is_cuda or input.dtype != self.weight.dtype or torch.is_autocast_enabled("cuda")
        if plain or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return super().forward(input)
        hidden, outputs = input.reshape(-1, input.shape[-1]), self.weight.shape[0]
        logits = hidden.new_empty(hidden.shape[0], -(-outputs // ROW) * ROW)[:, :outputs]
        if self.bias is None:
            torch.mm(hidden, self.weight.t(), out=logits)
        else:
            torch.addmm(self.bias, hidden, self.weight.t(), out=logits)
        return logits.unflatten(0, input.shape[:-1])


def align_logits(model: torch.nn.Module) -> None:
    """Makes the output projection of a model an `AlignedLogits` where 16 does not divide its vocabulary. Idempotent.

    Args:
        model: A transformers model. A projection that is no plain `torch.nn.Linear` stays as it is.
    """
    head: object = model.get_output_embeddings()  # type: ignore[operator]
    if type(head) is torch.nn.Linear and head.weight.shape[0] % ROW:
        head.__class__ = AlignedLogits
