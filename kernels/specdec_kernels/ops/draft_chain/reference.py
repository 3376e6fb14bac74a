"""Plain PyTorch definition of draft_chain: alternating passes and picks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...dispatch import argument_checks
from ..distribution_stats.reference import check_parameters, distribution_stats
from ..draft_sample.reference import draft_sample
from ..fused_forward.decoder_table import DecoderTable
from ..fused_forward.reference import fused_forward
from ..kv_slots.reference import kv_slots
from ..replay_sample.reference import replay_sample

_OP = "draft_chain"


def check(
    decoder: DecoderTable, tokens: Tensor, offsets: Tensor, drafts: Sequence[int], rows: Tensor, page_table: Tensor,
    lengths: Tensor, temperature: Tensor | None, top_k: Tensor, top_p: Tensor, min_p: Tensor, seeds: Tensor,
    positions: Tensor, vocab_size: int, first_draw: int | None = None,
) -> None:  # fmt: skip
    """Raises ValueError if arguments of `draft_chain` do not fit."""
    if not isinstance(decoder, DecoderTable):
        raise ValueError(
            f"{_OP}: decoder is {type(decoder).__name__}; expected a DecoderTable; make one, once, of the weights"
        )
    if not 1 <= vocab_size <= decoder.vocab_size:
        raise ValueError(f"{_OP}: vocab_size is {vocab_size}; expected 1..{decoder.vocab_size}, the decoder's")
    if first_draw is not None and not 0 <= first_draw < 2**31 - max(drafts, default=0):
        raise ValueError(f"{_OP}: first_draw is {first_draw}; expected 0 to 2**31, or None for the noise of replay")
    nodes = argument_checks.check_tensor(_OP, "tokens", tokens, torch.int64, "M").shape[0]
    batch = argument_checks.check_tensor(_OP, "rows", rows, torch.int32, "B").shape[0]
    capacity = argument_checks.check_tensor(_OP, "lengths", lengths, torch.int32, "R").shape[0]
    columns = argument_checks.check_tensor(_OP, "page_table", page_table, torch.int32, capacity, "P").shape[1]
    argument_checks.check_offsets(
        _OP, argument_checks.check_tensor(_OP, "offsets", offsets, torch.int32, batch + 1), nodes
    )
    argument_checks.check_tensor(_OP, "top_p", top_p, torch.float32, batch)
    check_parameters(_OP, torch.zeros_like(top_p) if temperature is None else temperature, top_k, top_p, min_p, batch)
    argument_checks.check_tensor(_OP, "seeds", seeds, torch.int64, batch)
    argument_checks.check_tensor(_OP, "positions", positions, torch.int32, batch)
    fed = (offsets[1:] - offsets[:-1]).tolist()
    if len(drafts) != batch or any(count < 1 for count in (*drafts, *fed)) or sum(fed) < nodes or not batch:
        raise ValueError(
            f"{_OP}: got drafts {list(drafts)} after {fed} of {nodes} tokens for {batch} rows; expected at least one "
            "of each in every row, and at least one row; leave out rows that draft nothing"
        )
    if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < decoder.vocab_size:
        raise ValueError(f"{_OP}: got tokens {tokens.tolist()}; expected 0..{decoder.vocab_size - 1}")
    if any(not 0 <= row < capacity for row in rows.tolist()) or len(set(rows.tolist())) < batch:
        raise ValueError(f"{_OP}: got rows {rows.tolist()}; expected different row ids below {capacity}")
    pages, page = decoder.keys[0].shape[:2]
    room = min(columns * page, decoder.positions)
    held = lengths[rows.long()].tolist()
    for row, start, count, more in zip(rows.tolist(), held, fed, drafts):
        if not 0 <= start <= start + count + more - 1 <= room:
            raise ValueError(
                f"{_OP}: row {row} holds {start} tokens and is fed {count} and {more - 1} drafts; expected at most "
                f"{room} in all; draft fewer, or give the decoder more room"
            )
        used = page_table[row, : -(-(start + count + more - 1) // page)]
        if not 0 <= int(used.min()) <= int(used.max()) < pages:
            raise ValueError(
                f"{_OP}: row {row} of page_table is {used.tolist()}; expected page ids below {pages}; reserve pages "
                "for what is fed and drafted before the chain"
            )


def draft_chain(
    decoder: DecoderTable, tokens: Tensor, offsets: Tensor, drafts: Sequence[int], rows: Tensor, page_table: Tensor,
    lengths: Tensor, temperature: Tensor | None, top_k: Tensor, top_p: Tensor, min_p: Tensor, seeds: Tensor,
    positions: Tensor, vocab_size: int, first_draw: int | None = None,
) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
    """Drafts chains of tokens with a decoder: passes with a pick after each, all in one call.

    The first pass is over the fed tokens, and one token is picked after the last of each row. The next passes are over
    what was picked, for rows that draft more. Keys and values of all fed tokens are stored; those of a row's last draft
    are not.

    Args:
        decoder: Weights and caches.
        tokens: Fed tokens, int64 [M].
        offsets: First fed token of each row, int32 [B + 1]; every row has at least one.
        drafts: Draft tokens of each row, at least 1 each.
        rows: Distinct rows of the cache, int32 [B].
        page_table: Page table of the whole cache, int32 [R, P]; see `kv_slots`.
        lengths: Lengths of the whole cache, int32 [R]. They grow in place by what is stored.
        temperature: float32 [B]; None for zeros. This and the next three are as in `distribution_stats`.
        top_k: int32 [B].
        top_p: float32 [B].
        min_p: float32 [B].
        seeds: Seed of each request, int64 [B].
        positions: Position of each root, the last fed token, int32 [B].
        vocab_size: Only tokens below it are picked.
        first_draw: None picks tokens as `replay_sample` does at their positions. A number picks them as `draft_sample`
            does, at level d with index first_draw + d.

    Returns:
        Draft tokens, int64 [B, max(drafts)], padded with -1. A token is also -1 if its logits have no distribution:
        they contain NaN or +inf, or none is finite. The row's next pass is then over token 0. With `first_draw` also
        what tokens were sampled from, level by level and row by row: logits [sum(drafts), vocab_size] and (inv_t, lse,
        cut, tie_id, mass) as in `distribution_stats`.

    Raises:
        ValueError: If arguments do not fit. Lengths are then unchanged.

    Source:
        Leviathan et al. 2023, algorithm 1, for chains of a draft model; Daliri et al. 2024 for noise shared with the
        target.
    """
    check(
        decoder, tokens, offsets, drafts, rows, page_table, lengths, temperature, top_k, top_p, min_p, seeds, positions,
        vocab_size, first_draw,
    )  # fmt: skip
    grown = lengths.clone()  # lengths change only if nothing raises
    depth, page = max(drafts, default=0), decoder.keys[0].shape[1]
    drafted = torch.full((rows.shape[0], depth), -1, dtype=torch.int64, device=tokens.device)
    if temperature is None:
        temperature = torch.zeros_like(top_p)
    remain = torch.tensor(list(drafts), dtype=torch.int32, device=tokens.device)
    dists: list[tuple[Tensor, ...]] = []
    fed, starts = tokens, offsets
    for level in range(depth):
        at = (remain > level).nonzero().flatten()
        if level:
            fed = drafted[at, level - 1].clamp(min=0)
            starts = torch.arange(len(at) + 1, dtype=torch.int32, device=tokens.device)
        table, held, slots, places = kv_slots(
            page_table, grown, rows[at], starts, None, fed.shape[0], page, advance=True
        )
        last = starts[1:].long() - 1
        logits = fused_forward(decoder, fed, places, last, slots, table, held, starts)
        assert isinstance(logits, Tensor)
        logits = logits[:, :vocab_size]
        inv_t, lse, cut, tie, mass = distribution_stats(
            logits, temperature[at], top_k[at], top_p[at], min_p[at], masses=True
        )
        if first_draw is None:
            picked = replay_sample(logits, inv_t, cut, tie, seeds[at], positions[at] + level + 1)
        else:
            index = torch.full_like(positions[at], first_draw + level)
            picked = draft_sample(logits, inv_t, lse, cut, tie, seeds[at], positions[at], index)
            dists.append((logits, inv_t, lse, cut, tie, mass))
        drafted[at, level] = torch.where(lse.isnan(), -1, picked)
    lengths.copy_(grown)
    if first_draw is None:
        return drafted
    return drafted, *(torch.cat(parts) for parts in zip(*dists))
