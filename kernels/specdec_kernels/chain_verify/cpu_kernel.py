"""C++ backend of chain_verify and chain_thresholds."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import expect
from .reference import Law, check

_chain_verify = torch.ops.specdec.chain_verify.default
_chain_thresholds = torch.ops.specdec.chain_thresholds.default
_NO_LAW = (None, None, None, None, None)
_NO_RACE = (None, None)


def chain_verify(
    tokens: Tensor,
    offsets: Tensor,
    drawn: Tensor,
    law_row: Tensor,
    target: Law,
    draft: Law | None,
    token_ids: Tensor | None,
    seeds: Tensor,
    root_positions: Tensor,
    uniforms: Tensor | None = None,
    race: tuple[Tensor, Tensor] | None = None,
    *,
    max_depth: int,
) -> tuple[Tensor, Tensor, Tensor]:
    try:
        return _chain_verify(
            tokens, offsets, drawn, law_row, *target, *(draft or _NO_LAW), token_ids, seeds, root_positions,
            uniforms, *(race or _NO_RACE), max_depth,
        )  # fmt: skip
    except (RuntimeError, ValueError, TypeError):
        chain = (tokens, offsets, drawn, law_row)
        check(
            *chain, target, draft, token_ids, seeds, root_positions, uniforms, race, max_depth=max_depth
        )  # raises with a remedy
        parts = (*chain, *target, *(draft or _NO_LAW), token_ids, seeds, root_positions, uniforms)
        return _chain_verify(*expect.contiguous(*parts, *(race or _NO_RACE)), max_depth)


def chain_thresholds(
    tokens: Tensor,
    offsets: Tensor,
    drawn: Tensor,
    law_row: Tensor,
    target: Law,
    draft: Law | None,
    token_ids: Tensor | None,
) -> tuple[Tensor, Tensor]:
    try:
        return _chain_thresholds(
            tokens, offsets, drawn, law_row, *target, *(draft or _NO_LAW), token_ids
        )  # fmt: skip
    except (RuntimeError, ValueError, TypeError):
        chain = (tokens, offsets, drawn, law_row)
        check(*chain, target, draft, token_ids)  # raises with a remedy
        return _chain_thresholds(*expect.contiguous(*chain, *target, *(draft or _NO_LAW), token_ids))
