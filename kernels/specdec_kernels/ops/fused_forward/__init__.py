"""Whole passes of Llama-like decoders. See `fused_forward` for the contract."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

from torch import Tensor

from ...dispatch.extension import cpu_backend
from ...dispatch.operator import Op
from .decoder_table import DecoderLayer, DecoderTable
from .reference import fused_forward as _reference


def _load_cpu() -> Callable[..., Any]:
    from .cpu_kernel import fused_forward

    return fused_forward


def why_not_decoder(decoder: DecoderTable, *args: Any, **kwargs: Any) -> str | None:
    """Why C++ cannot follow a decoder; None where it can."""
    return decoder.obstacle if isinstance(decoder, DecoderTable) else "decoder is no DecoderTable"


def decoder_key(decoder: DecoderTable, tokens: Tensor, *args: Any, **kwargs: Any) -> Hashable:
    """The signature of a call that begins with a decoder and tokens."""
    return tokens.device.type, getattr(decoder, "obstacle", "no DecoderTable")


# in no graph: the schema takes addresses, so nothing there would say that caches are written
_CPU = replace(cpu_backend(_load_cpu, why_not_decoder, op="fused_forward"), graph_devices={})
fused_forward = Op("fused_forward", _reference, [_CPU], key=decoder_key)

__all__ = ["DecoderLayer", "DecoderTable", "fused_forward"]
