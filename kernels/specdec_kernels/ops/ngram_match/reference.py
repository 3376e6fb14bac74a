"""Prompt lookup over token histories in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from ...dispatch import argument_checks


def check_sizes(tokens: Tensor, starts: Tensor, lengths: Tensor, n_max: int, n_min: int, num_tokens: int) -> None:
    """Raises ValueError unless shapes, dtypes and numbers of `ngram_match` fit together; looks at no data."""
    argument_checks.check_tensor("ngram_match", "tokens", tokens, torch.int64, "N")
    argument_checks.check_tensor("ngram_match", "starts", starts, torch.int64, "B")
    argument_checks.check_tensor("ngram_match", "lengths", lengths, torch.int32, starts.shape[0])
    if not 1 <= n_min <= n_max:
        raise ValueError(f"ngram_match: n_min is {n_min} and n_max is {n_max}; expected 1 <= n_min <= n_max")
    if num_tokens < 0:
        raise ValueError(f"ngram_match: num_tokens is {num_tokens}; expected 0 or more")


def check(tokens: Tensor, starts: Tensor, lengths: Tensor, n_max: int, n_min: int, num_tokens: int) -> None:
    """`check_sizes`, and that no history leaves `tokens`. Reads starts and lengths on the host."""
    check_sizes(tokens, starts, lengths, n_max, n_min, num_tokens)
    size = tokens.shape[0]
    for at, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist())):
        if start < 0 or length < 0 or start + length > size:
            raise ValueError(
                f"ngram_match: row {at} is [{start}, {start + length}) with length {length}; expected a part of the "
                f"{size} tokens"
            )


def ngram_match(
    tokens: Tensor,
    starts: Tensor,
    lengths: Tensor,
    n_max: int,
    n_min: int,
    num_tokens: int,
    frequent: bool = False,
) -> tuple[Tensor, ...]:
    """What followed the longest suffix of each history that occurred in it before (prompt lookup, Saxena 2023).

    The suffix has n_min to n_max tokens and ends at the newest one; an occurrence ends earlier. Of the
    occurrences of the longest such suffix the last one is copied, or, with `frequent`, the last of those that are
    followed by the token that most of them are followed by (of two that tie, the one that was seen last). A copy that
    reaches the end of the history goes on into itself.

    tokens: int64 [N]; starts: int64 [B]; lengths: int32 [B]: history b is tokens[starts[b] : starts[b] + lengths[b]].
    Packed histories have starts = offsets[:-1]; rows of a buffer [R, L] are tokens.view(-1) with starts = rows * L.
    n_max, n_min: longest and shortest suffix; num_tokens: K

    Returns: (int64 [B, K] tokens, -1 where nothing matched; int32 [B] length of the suffix that matched, 0 for none).
    Raises: ValueError for sizes that make no sense and histories that leave `tokens` (GPU kernels, which
        cannot raise for data, take these for empty).
    """
    check(tokens, starts, lengths, n_max, n_min, num_tokens)
    batch = starts.shape[0]
    drafts = torch.full((batch, num_tokens), -1, dtype=torch.int64, device=tokens.device)
    matched = torch.zeros(batch, dtype=torch.int32, device=tokens.device)
    for row, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist())):
        history = tokens[start : start + length]
        for size in range(min(n_max, length - 1), n_min - 1, -1):
            windows = history[:-1].unfold(0, size, 1)  # [length - size, size]: those that end before the newest token
            ends = (windows == history[length - size :]).all(1).nonzero().flatten() + size
            if ends.numel() == 0:
                continue
            if frequent:
                following = history[ends]
                counts = (following[:, None] == following).sum(1)
                ends = ends[counts == counts.max()]
            end = ends[-1]
            ahead = torch.arange(num_tokens, device=tokens.device) % (length - end)
            drafts[row] = history[end + ahead]
            matched[row] = size
            break
    return drafts, matched
