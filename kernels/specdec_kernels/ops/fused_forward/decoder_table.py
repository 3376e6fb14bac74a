"""DecoderTable: weights and caches of a decoder as `fused_forward` reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from ...dispatch import argument_checks

_OP = "fused_forward"
MATRICES = ("query", "key", "value", "out", "gate", "up", "down")
"""Matrices of a layer, which the C++ backend takes stored by input."""


@dataclass(frozen=True, slots=True, eq=False)
class DecoderLayer:
    """Weights of one layer. A matrix is [outputs, inputs] in any layout, as in a linear layer.

    Attributes:
        norm: Norm before attention, [hidden].
        query: [heads * width, hidden].
        key: [kv_heads * width, hidden].
        value: [kv_heads * width, hidden].
        out: [hidden, heads * width].
        mlp_norm: Norm before the MLP, [hidden].
        gate: [inner, hidden].
        up: [inner, hidden].
        down: [hidden, inner].
    """

    norm: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    mlp_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


class DecoderTable:
    """A prepared decoder for `fused_forward`: shapes are checked and addresses read once, at construction.

    All tensors have one dtype and one device, and are kept alive. Make a new table if one of them gets other memory.

    Args:
        embedding: [V, hidden].
        layers: Weights of one or more layers.
        norm: Last norm, [hidden].
        head: [V, hidden]; may be the embedding.
        rotary: For every position the cosines of its width / 2 angles and then the sines, [P, width].
        keys: Paged keys of every layer, contiguous [pages, page_size, kv_heads, width].
        values: Paged values of every layer, like `keys`.
        eps: Added to the mean square of a norm.
        scale: Factor of the attention scores.

    Attributes:
        obstacle: Why the C++ backend cannot run this decoder, or None.

    Raises:
        ValueError: If tensors do not fit together.
    """

    __slots__ = (
        "addresses", "embedding", "eps", "head", "heads", "keys", "layers", "norm", "obstacle", "rotary", "scale",
        "values",
    )  # fmt: skip

    def __init__(
        self,
        embedding: Tensor,
        layers: Sequence[DecoderLayer],
        norm: Tensor,
        head: Tensor,
        rotary: Tensor,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        *,
        eps: float,
        scale: float,
    ) -> None:
        self.embedding, self.layers, self.norm, self.head, self.rotary = embedding, tuple(layers), norm, head, rotary
        self.keys, self.values, self.eps, self.scale = tuple(keys), tuple(values), eps, scale
        self.heads = self._check()
        self.addresses = torch.tensor(self._entries(), dtype=torch.int64, device="cpu")
        self.obstacle = self._find_obstacle()

    def __reduce__(self) -> tuple[Callable[..., DecoderTable], tuple[Any, ...]]:
        parts = (self.embedding, self.layers, self.norm, self.head, self.rotary, self.keys, self.values)
        return _rebuild, (parts, self.eps, self.scale)  # a copy has addresses of its own

    @property
    def vocab_size(self) -> int:
        """Returns the rows of the embedding."""
        return self.embedding.shape[0]

    @property
    def inner(self) -> int:
        """Returns the width between `up` and `down`."""
        return self.layers[0].down.shape[1]

    def _check(self) -> int:
        """Checks all tensors and returns the number of heads. Raises ValueError."""
        if not self.layers or not len(self.layers) == len(self.keys) == len(self.values):
            raise ValueError(
                f"{_OP}: got {len(self.layers)} layers, {len(self.keys)} key and {len(self.values)} value caches; "
                "expected one of each for every layer, and at least one layer"
            )
        if not isinstance(self.embedding, Tensor) or self.embedding.dtype not in argument_checks.FLOAT_DTYPES:
            raise ValueError(f"{_OP}: embedding is no float tensor [V, hidden]; convert it with .to()")
        dtype = self.embedding.dtype
        vocab, hidden = argument_checks.check_tensor(_OP, "embedding", self.embedding, dtype, "V", "hidden").shape
        _, page, kv_heads, width = argument_checks.check_tensor(
            _OP, "keys", self.keys[0], dtype, "pages", "page", "kv_heads", "width"
        ).shape
        first = self.layers[0]
        outputs, inner = first.query.shape[0], first.down.shape[1]
        heads = outputs // width
        if width % 2 or heads < 1 or heads % kv_heads or outputs % width:
            raise ValueError(
                f"{_OP}: query has {outputs} outputs beside {kv_heads} kv_heads of width {width}; expected an even "
                "width and heads * width outputs, heads a multiple of kv_heads"
            )
        argument_checks.check_tensor(_OP, "norm", self.norm, dtype, hidden)
        argument_checks.check_tensor(_OP, "head", self.head, dtype, vocab, hidden)
        argument_checks.check_tensor(_OP, "rotary", self.rotary, dtype, "P", width)
        pages = self.keys[0].shape[0]
        for name, cache in [*(("keys", each) for each in self.keys), *(("values", each) for each in self.values)]:
            argument_checks.check_tensor(_OP, name, cache, dtype, pages, page, kv_heads, width)
        for layer in self.layers:
            for name in ("norm", "mlp_norm"):
                argument_checks.check_tensor(_OP, name, getattr(layer, name), dtype, hidden)
            argument_checks.check_tensor(_OP, "query", layer.query, dtype, outputs, hidden)
            for name in ("key", "value"):
                argument_checks.check_tensor(_OP, name, getattr(layer, name), dtype, kv_heads * width, hidden)
            argument_checks.check_tensor(_OP, "out", layer.out, dtype, hidden, outputs)
            for name in ("gate", "up"):
                argument_checks.check_tensor(_OP, name, getattr(layer, name), dtype, inner, hidden)
            argument_checks.check_tensor(_OP, "down", layer.down, dtype, hidden, inner)
        return heads

    def _find_obstacle(self) -> str | None:
        """Returns why the C++ backend cannot use the addresses, or None."""
        if self.embedding.dtype != torch.float32:
            return f"the decoder is {self.embedding.dtype}; expected torch.float32"
        if self.keys[0].shape[3] > 512:
            return f"heads are {self.keys[0].shape[3]} wide; expected at most 512"
        for layer in self.layers:
            for name in MATRICES:
                matrix = getattr(layer, name)
                if not matrix.t().is_contiguous():
                    return f"{name} has strides {matrix.stride()}; expected (1, {matrix.shape[0]}): stored by input"
        if not (self.head.is_contiguous() or self.head.t().is_contiguous()):
            return f"head has strides {self.head.stride()}; expected those of [V, hidden], stored by output or by input"
        rest = [self.embedding, self.norm, self.rotary, *self.keys, *self.values]
        rest += [each for layer in self.layers for each in (layer.norm, layer.mlp_norm)]
        if not all(each.is_contiguous() for each in rest):
            return "the embedding, a norm, the rotary table or a cache is strided; expected contiguous ones"
        everywhere = [*rest, self.head, *(getattr(layer, name) for layer in self.layers for name in MATRICES)]
        elsewhere = next((str(each.device) for each in everywhere if not each.is_cpu), None)
        if elsewhere is not None:
            return f"a part of the decoder is on {elsewhere}; expected all of it on cpu"
        return None

    def _entries(self) -> list[int]:
        """Returns the numbers and addresses that csrc/bindings/decoder.cpp reads."""
        (vocab, hidden), (pages, page, kv_heads, width) = self.embedding.shape, self.keys[0].shape
        whole = [each.data_ptr() for each in (self.embedding, self.norm, self.head, self.rotary)]
        sizes = [len(self.layers), vocab, hidden, self.heads, kv_heads, width, self.inner]
        each_layer = zip(self.layers, self.keys, self.values)
        tensors = [part for layer, keys, values in each_layer for part in (*_parts(layer), keys, values)]
        by_input = int(not self.head.is_contiguous())
        return [*whole, *sizes, self.rotary.shape[0], pages, page, by_input, *(part.data_ptr() for part in tensors)]


def _parts(layer: DecoderLayer) -> tuple[Tensor, ...]:
    return tuple(getattr(layer, each.name) for each in fields(layer))


def _rebuild(parts: tuple[object, ...], eps: float, scale: float) -> DecoderTable:
    return DecoderTable(*parts, eps=eps, scale=scale)  # type: ignore[arg-type]
