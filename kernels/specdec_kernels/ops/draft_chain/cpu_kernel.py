"""C++ backend of draft_chain: one call for all passes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ..fused_forward.decoder_table import DecoderTable
from .reference import check

_draft_chain = torch.ops.specdec.draft_chain.default
_draft_chain_dists = torch.ops.specdec.draft_chain_dists.default


@lru_cache(maxsize=512)
def _counts(drafts: tuple[int, ...]) -> tuple[Tensor, int, int]:
    """Returns counts as a tensor, their maximum and their sum. Cached, because most steps draft the same; read only."""
    counts = tuple(map(int, drafts))  # 1.0 has the same key
    with torch.inference_mode(False):
        return torch.tensor(counts, dtype=torch.int32, device="cpu"), max(counts), sum(counts)


def draft_chain(
    decoder: DecoderTable, tokens: Tensor, offsets: Tensor, drafts: Sequence[int], rows: Tensor, page_table: Tensor,
    lengths: Tensor, temperature: Tensor | None, top_k: Tensor, top_p: Tensor, min_p: Tensor, seeds: Tensor,
    positions: Tensor, vocab_size: int, first_draw: int | None = None,
) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
    """Calls the C++ operator. The checks of the reference name what is wrong with arguments that it refuses."""
    sampling = (temperature, top_k, top_p, min_p, seeds, positions)
    try:
        counts, depth, total = _counts(tuple(drafts))
        where = (decoder.addresses, tokens, offsets, counts, rows, page_table, lengths)
        if first_draw is None:
            drafted: Tensor = _draft_chain(*where, *sampling, depth, vocab_size)
            return drafted
        every = decoder.vocab_size
        found = _draft_chain_dists(*where, *sampling, first_draw, depth, total, vocab_size, every)
        return found if vocab_size == every else (found[0], found[1][:, :vocab_size], *found[2:])
    except (RuntimeError, ValueError):
        # raises with a message that says what to do
        check(decoder, tokens, offsets, drafts, rows, page_table, lengths, *sampling, vocab_size, first_draw)
        raise
