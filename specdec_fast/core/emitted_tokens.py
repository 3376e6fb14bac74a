"""The tokens that a step emits, as tensors. Tests: tests/core/test_emitted_tokens.py."""

from __future__ import annotations

from torch import Tensor


def tokens_after_path(tokens: Tensor, path: Tensor, num_accepted: Tensor, next_token: Tensor) -> Tensor:
    """Returns the token after each accepted node: the tokens that a step emits. Nothing is read on the host.

    Args:
        tokens: Tokens of the packed nodes, integers [M].
        path: Accepted nodes of each request, root first and padded with -1, [B, D + 1].
        num_accepted: Accepted draft tokens, [B].
        next_token: The token after them, int64 [B].

    Returns:
        int32 [B, D + 1]: accepted draft tokens, the next token, then -1.
    """
    if not tokens.shape[0]:
        return path.new_full(path.shape, -1)
    found = tokens.take(path.roll(-1, 1).long()).long()  # where a path has ended, -1 reads any token
    found.scatter_(1, num_accepted.long()[:, None], next_token[:, None])
    return found.masked_fill_(path < 0, -1).int()
