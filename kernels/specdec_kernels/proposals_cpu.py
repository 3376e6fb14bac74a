"""How the C++ operators on ordered proposals are called: all take the same arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from . import expect
from .proposals import Law

_NO_LAW = (None, None, None, None, None)
_NO_RACE = (None, None)


def verify_with(operator: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    """A *_verify over a C++ operator; `check` raises with a remedy for what the operator refuses."""

    def verify(
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
            return operator(
                *tree, *target, *(draft or _NO_LAW), token_ids, scouts, seeds, root_positions, uniforms,
                *(race or _NO_RACE), max_depth,
            )  # fmt: skip
        except (RuntimeError, ValueError, TypeError):
            noise = (seeds, root_positions, uniforms, race)
            check(*tree, target, draft, token_ids, scouts, *noise, max_depth=max_depth)
            parts = (*tree, *target, *(draft or _NO_LAW), token_ids, scouts, *noise[:3], *(race or _NO_RACE))
            return operator(*expect.contiguous(*parts), max_depth)

    return verify


def thresholds_with(operator: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    """A *_thresholds over a C++ operator."""

    def thresholds(
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
            return operator(*tree, *target, *(draft or _NO_LAW), token_ids, scouts)
        except (RuntimeError, ValueError, TypeError):
            check(*tree, target, draft, token_ids, scouts)
            return operator(*expect.contiguous(*tree, *target, *(draft or _NO_LAW), token_ids, scouts))

    return thresholds
