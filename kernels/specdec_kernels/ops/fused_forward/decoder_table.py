"""DecoderTable: weights and caches of a decoder as `fused_forward` reads them."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from ...dispatch import argument_checks

_OP = "fused_forward"
MATRICES = ("query", "key", "value", "out", "gate", "up", "down")
"""Matrices of a layer. The C++ backend takes them all stored by input, or all by output."""
SCALES = tuple(f"{name}_scale" for name in MATRICES)
"""Scales of these matrices if they are int8."""
ACTIVATIONS = ("silu", "gelu_tanh")
"""Activations of the gate, in the order of their numbers in csrc/decoder/fused_forward.h."""


@dataclass(frozen=True, slots=True, eq=False)
class DecoderLayer:
    """Weights of one layer. A matrix is [outputs, inputs] in any layout, as in a linear layer.

    With scales, float32 [outputs] of all seven matrices, these are int8 (see `batch_invariant_linear_int8`).

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
        query_bias: [heads * width], or None.
        key_bias: [kv_heads * width], or None.
        value_bias: [kv_heads * width], or None.
        out_bias: [hidden], or None.
        query_norm: Norm of each query head before its rotation, [width], or None.
        key_norm: Norm of each key head before its rotation, [width], or None.
        post_norm: Norm of the attention's output before it is added, [hidden], or None.
        mlp_post_norm: Norm of the MLP's output before it is added, [hidden], or None.
        query_scale: Scale of `query`, or None.
        key_scale: Scale of `key`, or None.
        value_scale: Scale of `value`, or None.
        out_scale: Scale of `out`, or None.
        gate_scale: Scale of `gate`, or None.
        up_scale: Scale of `up`, or None.
        down_scale: Scale of `down`, or None.
        window: Tokens that a query sees, as in `tree_attention`; 0 for all.
        rotary: Index of the rotary table.
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
    query_bias: Tensor | None = None
    key_bias: Tensor | None = None
    value_bias: Tensor | None = None
    out_bias: Tensor | None = None
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    post_norm: Tensor | None = None
    mlp_post_norm: Tensor | None = None
    query_scale: Tensor | None = None
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None
    out_scale: Tensor | None = None
    gate_scale: Tensor | None = None
    up_scale: Tensor | None = None
    down_scale: Tensor | None = None
    window: int = 0
    rotary: int = 0


_REQUIRED = tuple(each.name for each in fields(DecoderLayer) if each.default is MISSING)
_WEIGHTS = tuple(each.name for each in fields(DecoderLayer) if each.name not in ("window", "rotary"))


@dataclass(frozen=True, slots=True)
class DecoderNumbers:
    """Constants of a decoder.

    Attributes:
        eps: Added to the mean square of a norm.
        scale: Factor of the attention scores.
        softcap: Soft cap of the attention scores, as in `tree_attention`; 0 for none.
        logits_softcap: Logits become cap * tanh(logit / cap); 0 for no cap.
        embedding_scale: Factor of the embeddings.
        norm_offset: Added to the weights of all norms. Gemma's norms multiply by 1 + weight.
        activation: Activation of the gate: "silu", or "gelu_tanh" for the tanh approximation of GELU.
    """

    eps: float
    scale: float
    softcap: float = 0.0
    logits_softcap: float = 0.0
    embedding_scale: float = 1.0
    norm_offset: float = 0.0
    activation: str = "silu"


class DecoderTable:
    """A prepared decoder for `fused_forward`: shapes are checked and addresses read once, at construction.

    All tensors but int8 matrices and their scales have one dtype. All have one device, and are kept alive. Make a new
    table if one of them gets other memory.

    Args:
        embedding: [V, hidden].
        layers: Weights of one or more layers.
        norm: Last norm, [hidden].
        head: [V, hidden]; may be the embedding.
        rotary: For every position the cosines of its width / 2 angles and then the sines, [P, width]; or R such tables,
            [R, P, width].
        keys: Paged keys of every layer, contiguous [pages, page_size, kv_heads, width].
        values: Paged values of every layer, like `keys`.
        numbers: Constants.
        head_scale: Scale of an int8 head, float32 [V]. The matrices of all layers are then int8 too. None for floats.

    Attributes:
        rotary: The rotary tables, [R, P, width].
        addresses: What the C++ backend reads, int64.
        obstacle: Why the C++ backend cannot run this decoder, or None.

    Raises:
        ValueError: If tensors do not fit together, or if a constant is out of range.
    """

    __slots__ = (
        "addresses", "embedding", "head", "head_scale", "heads", "keys", "layers", "norm", "numbers", "obstacle",
        "rotary", "values",
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
        numbers: DecoderNumbers,
        head_scale: Tensor | None = None,
    ) -> None:
        self.embedding, self.layers, self.norm, self.head = embedding, tuple(layers), norm, head
        self.rotary = rotary[None] if rotary.dim() == 2 else rotary
        self.keys, self.values, self.numbers = tuple(keys), tuple(values), numbers
        self.head_scale = head_scale
        self.heads = self._check()
        self._check_numbers()
        self.addresses = torch.tensor(self._entries(), dtype=torch.int64, device="cpu")
        self.obstacle = self._find_obstacle()

    def __reduce__(self) -> tuple[Callable[..., DecoderTable], tuple[Any, ...]]:
        parts = (self.embedding, self.layers, self.norm, self.head, self.rotary, self.keys, self.values, self.numbers)
        return DecoderTable, (*parts, self.head_scale)  # a copy has addresses of its own

    @property
    def vocab_size(self) -> int:
        """Returns the rows of the embedding."""
        return self.embedding.shape[0]

    @property
    def inner(self) -> int:
        """Returns the width between `up` and `down`."""
        return self.layers[0].down.shape[1]

    @property
    def is_bfloat16(self) -> bool:
        """Returns whether weights and caches are bfloat16."""
        return self.embedding.dtype == torch.bfloat16

    @property
    def positions(self) -> int:
        """Returns the positions in a rotary table."""
        return self.rotary.shape[1]

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
        matrices = dtype if self.head_scale is None else torch.int8
        argument_checks.check_tensor(_OP, "head", self.head, matrices, vocab, hidden)
        if self.head_scale is not None:
            argument_checks.check_tensor(_OP, "head_scale", self.head_scale, torch.float32, vocab)
        argument_checks.check_tensor(_OP, "rotary", self.rotary, dtype, "R", "P", width)
        pages = self.keys[0].shape[0]
        for name, cache in [*(("keys", each) for each in self.keys), *(("values", each) for each in self.values)]:
            argument_checks.check_tensor(_OP, name, cache, dtype, pages, page, kv_heads, width)
        shared, tables = kv_heads * width, self.rotary.shape[0]
        shapes: dict[str, tuple[int, ...]] = {
            "norm": (hidden,), "query": (outputs, hidden), "key": (shared, hidden), "value": (shared, hidden),
            "out": (hidden, outputs), "mlp_norm": (hidden,), "gate": (inner, hidden), "up": (inner, hidden),
            "down": (hidden, inner), "query_bias": (outputs,), "key_bias": (shared,), "value_bias": (shared,),
            "out_bias": (hidden,), "query_norm": (width,), "key_norm": (width,), "post_norm": (hidden,),
            "mlp_post_norm": (hidden,),
        }  # fmt: skip
        for layer in self.layers:
            for name, shape in shapes.items():
                if getattr(layer, name) is not None or name in _REQUIRED:
                    kind = matrices if name in MATRICES else dtype
                    argument_checks.check_tensor(_OP, name, getattr(layer, name), kind, *shape)
            for name, scale in zip(MATRICES, SCALES):
                if self.head_scale is not None:
                    argument_checks.check_tensor(_OP, scale, getattr(layer, scale), torch.float32, shapes[name][0])
                elif getattr(layer, scale) is not None:
                    raise ValueError(f"{_OP}: {scale} is given without head_scale; expected all scales, or none")
            if layer.window < 0 or not 0 <= layer.rotary < tables:
                raise ValueError(
                    f"{_OP}: a layer has window {layer.window} and rotary table {layer.rotary}; expected a window of 0 "
                    f"or more and a table below {tables}"
                )
        return heads

    def _check_numbers(self) -> None:
        """Checks the constants. Raises ValueError."""
        numbers = self.numbers
        if numbers.activation not in ACTIVATIONS:
            raise ValueError(f"{_OP}: activation is {numbers.activation!r}; expected one of {', '.join(ACTIVATIONS)}")
        if numbers.softcap < 0 or numbers.logits_softcap < 0:
            raise ValueError(
                f"{_OP}: softcap is {numbers.softcap} and logits_softcap {numbers.logits_softcap}; expected 0 for "
                "none, or a positive number"
            )

    def _find_obstacle(self) -> str | None:
        """Returns why the C++ backend cannot use the addresses, or None."""
        if self.embedding.dtype not in (torch.float32, torch.bfloat16):
            return f"the decoder is {self.embedding.dtype}; expected torch.float32 or torch.bfloat16"
        if self.keys[0].shape[3] > 512:
            return f"heads are {self.keys[0].shape[3]} wide; expected at most 512"
        by_output = self.head_scale is not None or _is_by_output(self.layers)
        for layer in self.layers:
            for name in MATRICES:
                matrix = getattr(layer, name)
                if not (matrix if by_output else matrix.t()).is_contiguous():
                    strides = (matrix.shape[1], 1) if by_output else (1, matrix.shape[0])
                    stored = "output, as all others" if by_output else "input"
                    return f"{name} has strides {matrix.stride()}; expected {strides}: stored by {stored}"
        if not (self.head.is_contiguous() or (self.head_scale is None and self.head.t().is_contiguous())):
            return f"head has strides {self.head.stride()}; expected those of [V, hidden], stored by output or by input"
        rest = [self.embedding, self.norm, self.rotary, *self.keys, *self.values]
        parts = [each for layer in self.layers for each in _weights(layer) if each is not None]
        rest += [each for each in (*parts, self.head_scale) if each is not None and each.dim() == 1]
        if not all(each.is_contiguous() for each in rest):
            return (
                "the embedding, a norm, a bias, a scale, a rotary table or a cache is strided; expected contiguous ones"
            )
        everywhere = [*rest, self.head, *parts]
        elsewhere = next((str(each.device) for each in everywhere if not each.is_cpu), None)
        if elsewhere is not None:
            return f"a part of the decoder is on {elsewhere}; expected all of it on cpu"
        return None

    def _entries(self) -> list[int]:
        """Returns the numbers and addresses that csrc/bindings/decoder.cpp reads."""
        (vocab, hidden), (pages, page, kv_heads, width) = self.embedding.shape, self.keys[0].shape
        whole = [each.data_ptr() for each in (self.embedding, self.norm, self.head)]
        sizes = [len(self.layers), vocab, hidden, self.heads, kv_heads, width, self.inner, self.positions, pages, page]
        numbers = self.numbers
        choices = [int(not self.head.is_contiguous()), ACTIVATIONS.index(numbers.activation)]
        floats = (numbers.eps, numbers.scale, numbers.softcap, numbers.logits_softcap, numbers.embedding_scale)
        layout = [int(self.is_bfloat16), int(not _is_by_output(self.layers))]
        layout.append(0 if self.head_scale is None else self.head_scale.data_ptr())
        bits = struct.unpack("6q", struct.pack("6d", *floats, numbers.norm_offset))
        rows = []
        for layer, keys, values in zip(self.layers, self.keys, self.values):
            tensors = (*_weights(layer), self.rotary[layer.rotary], keys, values)
            rows += [0 if part is None else part.data_ptr() for part in tensors] + [layer.window]
        return [*whole, *sizes, *choices, *bits, *layout, *rows]


def _is_by_output(layers: Sequence[DecoderLayer]) -> bool:
    """Whether all matrices are stored by output, as torch does."""
    return all(getattr(layer, name).is_contiguous() for layer in layers for name in MATRICES)


def _weights(layer: DecoderLayer) -> tuple[Tensor | None, ...]:
    return tuple(getattr(layer, name) for name in _WEIGHTS)
