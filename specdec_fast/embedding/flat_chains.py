"""Chains in vLLM's layout: flat `draft_token_ids` and `cu_num_draft_tokens`, without the leading 0.

Tests: tests/embedding/test_conversions.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def flat_from_chains(draft_tokens: Tensor, lengths: Sequence[int] | Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Joins padded chains. On a GPU it waits, because the number of tokens is read.

    Args:
        draft_tokens: Draft tokens of each request, integers [B, K].
        lengths: Draft tokens of each request, 0 to K. None: those before its first -1.

    Returns:
        Flat tokens int32 [N], and how many of them belong to the first requests, int32 [B], the first request
        included.

    Raises:
        ValueError: If a shape or a length is wrong.
    """
    if draft_tokens.dim() != 2:
        raise ValueError(f"draft_tokens: got {list(draft_tokens.shape)}; expected [B, K], one row per request")
    rows, width = draft_tokens.shape
    places = torch.arange(width, device=draft_tokens.device)
    if lengths is None:
        counts = (draft_tokens >= 0).cumprod(1).sum(1)
    else:
        counts = torch.as_tensor(lengths, dtype=torch.int64, device=draft_tokens.device)
        if tuple(counts.shape) != (rows,) or (rows and not 0 <= int(counts.min()) <= int(counts.max()) <= width):
            raise ValueError(f"lengths: got {counts.tolist()}; expected {rows} numbers from 0 to {width}")
    kept = draft_tokens[places < counts[:, None]].to(torch.int32)
    return kept, counts.cumsum(0).to(torch.int32)


def chains_from_flat(
    draft_token_ids: Tensor, cu_num_draft_tokens: Tensor, width: int | None = None
) -> tuple[Tensor, Tensor]:
    """Splits flat tokens into padded chains.

    Args:
        draft_token_ids: Tokens of all requests, integers [N].
        cu_num_draft_tokens: How many of them belong to the first requests, integers [B], the first request included.
        width: K of the result. None: the longest chain, which a GPU has to wait for.

    Returns:
        Tokens int32 [B, K], padded with -1, and the draft tokens of each request, int32 [B].

    Raises:
        ValueError: If the numbers decrease, do not end at N, or exceed `width`. Values on a GPU are not read.
    """
    ends = cu_num_draft_tokens.long()
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])[: len(ends)]
    counts = ends - starts
    longest = int(counts.max()) if len(counts) and (width is None or counts.is_cpu) else 0
    if ends.is_cpu and len(ends):
        total = draft_token_ids.shape[0]
        if int(counts.min()) < 0 or int(ends[-1]) != total:
            raise ValueError(
                f"cu_num_draft_tokens: got {ends.tolist()} and {total} tokens; expected numbers that never decrease "
                f"and end at {total}, without a leading 0"
            )
        if width is not None and longest > width:
            raise ValueError(f"width: got {width} and a chain of {longest} tokens; expected at least {longest}")
    width = longest if width is None else width
    places = starts[:, None] + torch.arange(width, device=ends.device)
    tokens = torch.cat([draft_token_ids.to(torch.int32), draft_token_ids.new_full((1,), -1, dtype=torch.int32)])
    inside = places < ends[:, None]
    return tokens[torch.where(inside, places, -1)], counts.to(torch.int32)
