"""Linear layers: memory layout and multiplication on a CPU, alignment of logits on a GPU.

Tests: tests/targets/test_linear_layers.py, tests/launch/test_aligned_logits.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from specdec_fast.targets.model_state import memory_as_made
from specdec_kernels import UnsupportedError, batch_invariant_linear, stores_by_input

__all__ = ["AlignedLogits", "BatchInvariantLinear", "align_logits", "store_by_input"]


_INSTRUCTIONS = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}


@cache
def has_instructions(dtype: torch.dtype) -> bool:
    """Returns whether torch multiplies in this half precision with the processor's own instructions.

    Without them (AVX2), torch takes several times as long as `batch_invariant_linear`, and longer if weights are stored
    by input.
    """
    asked = getattr(torch.ops.mkldnn, _INSTRUCTIONS[dtype], None) if dtype in _INSTRUCTIONS else None
    return asked is None or bool(asked())


def uses_batch_invariant_linear(dtype: torch.dtype) -> bool:
    """Returns whether `batch_invariant_linear` multiplies in this dtype, if it is available."""
    return dtype in (torch.float32, torch.bfloat16) or not has_instructions(dtype)


class BatchInvariantLinear(torch.nn.Linear):
    """A linear layer that uses `batch_invariant_linear`: a token gets the same bits alone and in a batch.

    It serves float32 and bfloat16 on a CPU, and float16 where torch is slow, outside of autograd. Otherwise it is an
    ordinary `torch.nn.Linear`.
    """

    product: Callable[..., Tensor]
    """The operator's backend, called directly: look-ups cost time in passes of one token through small layers."""

    def forward(self, input: Tensor) -> Tensor:
        """Runs the batch-invariant kernel where it serves, else the module's own forward."""
        served = input.is_cpu and input.dtype == self.weight.dtype and uses_batch_invariant_linear(input.dtype)
        if served and not torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu"):
            return BatchInvariantLinear.product(input, self.weight, self.bias)
        return super().forward(input)


def store_by_input(model: torch.nn.Module) -> None:
    """Stores the weights of all linear layers with the outputs of one input side by side, in place.

    Values, shapes and names stay; strides become (1, outputs). A product with few rows, as in decoding, is then a sum
    of whole stored vectors and takes less time. Processors that multiply pairs of bfloat16 are as fast with torch's
    layout, which then stays. Weights that are also embeddings, offloaded weights, and tensors of other types stay
    unchanged. Layers become `BatchInvariantLinear` if that is faster and the compiled operator is available and
    selected. If it would be faster but is not available, weights in half precision stay unchanged. Calling it twice is
    harmless.

    Args:
        model: A transformers model on a CPU.
    """
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    for module in model.modules():
        if type(module) is torch.nn.Linear and type(module.weight.data) is Tensor and not module.weight.is_meta:
            dtype = module.weight.dtype
            product = _compiled(module.weight) if uses_batch_invariant_linear(dtype) else None
            slow = product is None and not has_instructions(dtype)
            moves = not slow and (product is None or stores_by_input(dtype))
            if id(module.weight) not in embeddings and moves and module.weight.stride(0) != 1:
                with memory_as_made(module.weight):
                    module.weight.data = module.weight.data.t().contiguous().t()
            if product is not None:
                BatchInvariantLinear.product = product
                module.__class__ = BatchInvariantLinear


class BatchInvariantWeight(torch.nn.Parameter):
    """A weight that a model multiplies as `weight @ columns`, as Mamba does. Each column has the bits it has alone."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Calls a function of torch. Products with [..., inputs, M] are `batch_invariant_linear`."""
        with torch._C.DisableTorchFunctionSubclass():
            if func in _PRODUCTS and isinstance(args[0], cls) and uses_batch_invariant_linear(args[0].dtype):
                weight, columns = args[0], args[1]
                if columns.is_cpu and columns.dtype == weight.dtype and weight.dim() == 2:
                    return batch_invariant_linear(columns.mT.contiguous(), weight).mT
            return func(*args, **(kwargs or {}))


_PRODUCTS = frozenset({torch.matmul, Tensor.matmul, Tensor.__matmul__})


def _compiled(weight: Tensor) -> Callable[..., Tensor] | None:
    """The compiled operator, or None."""
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
