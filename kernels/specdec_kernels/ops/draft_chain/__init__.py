"""draft_chain: chains of tokens drafted by a Llama-like decoder in one call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...dispatch.extension import cpu_backend
from ...dispatch.operator import Op, lazy_import
from ..fused_forward import DecoderTable, decoder_key, why_not_decoder
from .reference import draft_chain as _reference


def why_not_chain(decoder: DecoderTable, *args: Any, **kwargs: Any) -> str | None:
    """Returns why the C++ backend cannot draft with a decoder, or None."""
    reason = why_not_decoder(decoder)
    return "the decoder is torch.bfloat16; expected torch.float32" if reason is None and decoder.is_bfloat16 else reason


# not in graphs, as fused_forward
_CPU = replace(
    cpu_backend(lazy_import(__name__, "cpu_kernel:draft_chain"), why_not_chain, op="draft_chain"), graph_devices={}
)
draft_chain = Op("draft_chain", _reference, [_CPU], key=decoder_key)

__all__ = ["draft_chain"]
