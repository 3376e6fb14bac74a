"""C++ backend of fused_forward: one call from tokens to logits."""

from __future__ import annotations

import torch
from torch import Tensor

from .decoder_table import DecoderTable
from .reference import check

_fused_forward = torch.ops.specdec.fused_forward.default


def fused_forward(
    decoder: DecoderTable,
    tokens: Tensor,
    positions: Tensor,
    wanted: Tensor | None,
    slots: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    offsets: Tensor,
    ancestors: Tensor | None = None,
    depth: Tensor | None = None,
) -> Tensor:
    """Calls the C++ operator. The checks of the reference name what is wrong with arguments that it refuses."""
    where = (tokens, positions, wanted, slots, page_table, lengths, offsets, ancestors, depth)
    try:
        logits: Tensor = _fused_forward(decoder.addresses, *where, decoder.vocab_size, decoder.is_bfloat16)
    except (RuntimeError, ValueError):
        check(decoder, *where)  # raises with a message that says what to do
        raise
    return logits
