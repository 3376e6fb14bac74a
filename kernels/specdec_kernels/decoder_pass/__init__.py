"""Whole passes of Llama-like decoders. See `decoder_pass` for the contract."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..dispatch import Op
from ..extension import cpu_backend
from .decoder_table import DecoderLayer, DecoderTable
from .reference import decoder_pass as _reference


def _load_cpu() -> Callable[..., Any]:
    from .cpu_kernel import decoder_pass

    return decoder_pass


def _why_not(decoder: DecoderTable, *args: Any, **kwargs: Any) -> str | None:
    return decoder.obstacle if isinstance(decoder, DecoderTable) else "decoder is no DecoderTable"


def _key(decoder: DecoderTable, tokens: Tensor, *args: Any, **kwargs: Any) -> Hashable:
    return tokens.device.type, getattr(decoder, "obstacle", "no DecoderTable")


# in no graph: the schema takes addresses, so nothing there would say that caches are written
_CPU = replace(cpu_backend(_load_cpu, _why_not, op="decoder_pass"), graph_devices={})
decoder_pass = Op("decoder_pass", _reference, [_CPU], key=_key)

__all__ = ["DecoderLayer", "DecoderTable", "decoder_pass"]
