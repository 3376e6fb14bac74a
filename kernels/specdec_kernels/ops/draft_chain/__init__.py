"""draft_chain: chains of tokens drafted by a Llama-like decoder in one call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ...dispatch.extension import cpu_backend
from ...dispatch.operator import Op
from ..fused_forward import decoder_key, why_not_decoder
from .reference import draft_chain as _reference


def _load_cpu() -> Callable[..., Any]:
    from .cpu_kernel import draft_chain

    return draft_chain


# not in graphs, as fused_forward
_CPU = replace(cpu_backend(_load_cpu, why_not_decoder, op="draft_chain"), graph_devices={})
draft_chain = Op("draft_chain", _reference, [_CPU], key=decoder_key)

__all__ = ["draft_chain"]
