"""fused_forward: the forward pass of a Llama-like decoder in one call."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

from torch import Tensor

from ...dispatch.extension import cpu_backend
from ...dispatch.operator import Op, lazy_import
from .decoder_table import DecoderLayer, DecoderNumbers, DecoderTable
from .reference import fused_forward as _reference


def why_not_decoder(decoder: DecoderTable, *args: Any, **kwargs: Any) -> str | None:
    """Returns why the C++ backend cannot run a decoder, or None."""
    return decoder.obstacle if isinstance(decoder, DecoderTable) else "decoder is no DecoderTable"


def decoder_key(decoder: DecoderTable, tokens: Tensor, *args: Any, **kwargs: Any) -> Hashable:
    """Returns the signature of a call whose first arguments are a decoder and tokens."""
    return tokens.device.type, getattr(decoder, "obstacle", "no DecoderTable"), getattr(decoder, "is_bfloat16", None)


# not in graphs: the schema takes addresses and cannot declare that caches are written
_CPU = replace(
    cpu_backend(lazy_import(__name__, "cpu_kernel:fused_forward"), why_not_decoder, op="fused_forward"),
    graph_devices={},
)
fused_forward = Op("fused_forward", _reference, [_CPU], key=decoder_key)

__all__ = ["DecoderLayer", "DecoderNumbers", "DecoderTable", "fused_forward"]
