"""C++ backend of fused_forward: one call from tokens to logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .decoder_table import DecoderTable
from .reference import check

_fused_forward = torch.ops.specdec.fused_forward.default
_fused_forward_states = torch.ops.specdec.fused_forward_states.default


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
    states: Sequence[int] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Calls the C++ operators. The checks of the reference name what is wrong with arguments that it refuses."""
    where = (tokens, positions, wanted, slots, page_table, lengths, offsets, ancestors, depth)
    try:
        if states is None:
            logits: Tensor = _fused_forward(decoder.addresses, *where, decoder.vocab_size, decoder.is_bfloat16)
            return logits
        chosen = torch.tensor(states, dtype=torch.int64, device="cpu")
        sizes = decoder.vocab_size, decoder.embedding.shape[1], decoder.is_bfloat16
        both: tuple[Tensor, Tensor] = _fused_forward_states(decoder.addresses, *where, chosen, *sizes)
        return both
    except (RuntimeError, ValueError):
        check(decoder, *where, states)  # raises with a message that says what to do
        raise
