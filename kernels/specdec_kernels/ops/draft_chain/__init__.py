"""draft_chain: chains of tokens drafted by a Llama-like decoder in one call."""

from __future__ import annotations

from dataclasses import replace

from ...dispatch.extension import cpu_backend
from ...dispatch.operator import Op, lazy_import
from ..fused_forward import decoder_key, why_not_decoder
from .reference import draft_chain as _reference

# not in graphs, as fused_forward
_CPU = replace(
    cpu_backend(lazy_import(__name__, "cpu_kernel:draft_chain"), why_not_decoder, op="draft_chain"), graph_devices={}
)
draft_chain = Op("draft_chain", _reference, [_CPU], key=decoder_key)

__all__ = ["draft_chain"]
