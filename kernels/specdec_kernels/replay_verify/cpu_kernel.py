"""C++ backend of replay_verify."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import expect
from .reference import check

_replay_verify = torch.ops.specdec.replay_verify.default


def replay_verify(
    tokens: Tensor,
    offsets: Tensor,
    first_child: Tensor,
    next_sibling: Tensor,
    scouts: Tensor | None,
    logits: Tensor,
    sampling: tuple[Tensor, Tensor, Tensor, Tensor],
    seeds: Tensor,
    root_positions: Tensor,
    *,
    max_depth: int,
) -> tuple[Tensor, ...]:
    parts = (tokens, offsets, first_child, next_sibling, scouts, logits, *sampling, seeds, root_positions)
    try:
        return _replay_verify(*parts, max_depth)
    except (RuntimeError, ValueError, TypeError):
        check(
            tokens, offsets, first_child, next_sibling, scouts, logits, sampling, seeds, root_positions,
            max_depth=max_depth,
        )  # fmt: skip  # raises with a remedy
        return _replay_verify(*expect.contiguous(*parts), max_depth)
