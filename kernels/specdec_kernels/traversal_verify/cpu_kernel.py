"""C++ backend of traversal_verify and traversal_thresholds."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import expect
from ..proposals import Law
from .reference import check

_verify = torch.ops.specdec.traversal_verify.default
_thresholds = torch.ops.specdec.traversal_thresholds.default
_NO_LAW = (None, None, None, None, None)
_NO_RACE = (None, None)


def traversal_verify(
    tokens: Tensor,
    offsets: Tensor,
    first_child: Tensor,
    next_sibling: Tensor,
    drawn: Tensor,
    law_row: Tensor,
    target: Law,
    draft: Law | None,
    token_ids: Tensor | None,
    scouts: Tensor | None,
    seeds: Tensor,
    root_positions: Tensor,
    uniforms: Tensor | None = None,
    race: tuple[Tensor, Tensor] | None = None,
    *,
    max_depth: int,
) -> tuple[Tensor, Tensor, Tensor]:
    tree = (tokens, offsets, first_child, next_sibling, drawn, law_row)
    try:
        return _verify(
            *tree, *target, *(draft or _NO_LAW), token_ids, scouts, seeds, root_positions, uniforms,
            *(race or _NO_RACE), max_depth,
        )  # fmt: skip
    except (RuntimeError, ValueError, TypeError):
        noise = (seeds, root_positions, uniforms, race)
        check(*tree, target, draft, token_ids, scouts, *noise, max_depth=max_depth)  # raises with a remedy
        parts = (*tree, *target, *(draft or _NO_LAW), token_ids, scouts, *noise[:3], *(race or _NO_RACE))
        return _verify(*expect.contiguous(*parts), max_depth)


def traversal_thresholds(
    tokens: Tensor,
    offsets: Tensor,
    first_child: Tensor,
    next_sibling: Tensor,
    drawn: Tensor,
    law_row: Tensor,
    target: Law,
    draft: Law | None,
    token_ids: Tensor | None,
    scouts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    tree = (tokens, offsets, first_child, next_sibling, drawn, law_row)
    try:
        return _thresholds(*tree, *target, *(draft or _NO_LAW), token_ids, scouts)
    except (RuntimeError, ValueError, TypeError):
        check(*tree, target, draft, token_ids, scouts)  # raises with a remedy
        return _thresholds(*expect.contiguous(*tree, *target, *(draft or _NO_LAW), token_ids, scouts))
