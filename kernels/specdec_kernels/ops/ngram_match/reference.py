"""Plain PyTorch definition of ngram_match."""

from __future__ import annotations

import torch
from torch import Tensor

from ...dispatch import argument_checks


def check_sizes(tokens: Tensor, starts: Tensor, lengths: Tensor, n_max: int, n_min: int, num_tokens: int) -> None:
    """Raises ValueError unless shapes, dtypes and numbers fit together. Reads no data."""
    argument_checks.check_tensor("ngram_match", "tokens", tokens, torch.int64, "N")
    argument_checks.check_tensor("ngram_match", "starts", starts, torch.int64, "B")
    argument_checks.check_tensor("ngram_match", "lengths", lengths, torch.int32, starts.shape[0])
    if not 1 <= n_min <= n_max:
        raise ValueError(f"ngram_match: n_min is {n_min} and n_max is {n_max}; expected 1 <= n_min <= n_max")
    if num_tokens < 0:
        raise ValueError(f"ngram_match: num_tokens is {num_tokens}; expected 0 or more")


def check_arguments(tokens: Tensor, starts: Tensor, lengths: Tensor, n_max: int, n_min: int, num_tokens: int) -> None:
    """Checks sizes, and that no history leaves `tokens`. Reads starts and lengths on the host."""
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
    """Drafts what followed the longest suffix of each history that occurred in it before (prompt lookup).

    The suffix has n_min to n_max tokens and ends at the newest one; an occurrence ends earlier. The last occurrence of
    the longest such suffix is copied. With `frequent`, only occurrences that are followed by the most frequent token
    count; of two tokens that tie, the one seen last counts. A copy that reaches the end of the history continues in
    itself.

    Args:
        tokens: Histories, int64 [N]. History b is tokens[starts[b] : starts[b] + lengths[b]]. Packed histories have
            starts = offsets[:-1]; rows of a buffer [R, L] are tokens.view(-1) with starts = rows * L.
        starts: First token of each history, int64 [B].
        lengths: Tokens of each history, int32 [B].
        n_max: Longest suffix.
        n_min: Shortest suffix.
        num_tokens: Draft tokens per history, K.
        frequent: Whether to prefer the most frequent continuation.

    Returns:
        Draft tokens, int64 [B, K], -1 if nothing matched; and the length of the matched suffix, int32 [B], 0 for none.

    Raises:
        ValueError: If sizes make no sense or a history leaves `tokens`. GPU kernels, which cannot raise for data, treat
            such a history as empty.

    Source:
        Prompt lookup decoding, Saxena 2023.
    """
    check_arguments(tokens, starts, lengths, n_max, n_min, num_tokens)
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
