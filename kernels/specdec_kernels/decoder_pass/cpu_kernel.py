"""C++ backend of decoder_pass: everything between tokens and logits in one call."""

from __future__ import annotations

import torch
from torch import Tensor

from .decoder_table import DecoderTable
from .reference import check

_decoder_pass = torch.ops.specdec.decoder_pass.default


def decoder_pass(
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
    where = (tokens, positions, wanted, slots, page_table, lengths, offsets, ancestors, depth)
    try:
        logits: Tensor = _decoder_pass(decoder.addresses, *where, decoder.vocab_size, decoder.eps, decoder.scale)
    except (RuntimeError, ValueError):
        check(decoder, *where)  # raises with a remedy
        raise
    return logits
