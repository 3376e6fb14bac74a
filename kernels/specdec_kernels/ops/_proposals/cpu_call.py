"""How the C++ operators on ordered proposals are called: all take the same arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ...dispatch import argument_checks
from .reference import Distribution

_NO_DIST = (None, None, None, None, None)
_NO_RACE = (None, None)


def verify_with(operator: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    """A *_verify over a C++ operator; `check` raises with a remedy for what the operator refuses."""

    def verify(
        tokens: Tensor,
        offsets: Tensor,
        first_child: Tensor,
        next_sibling: Tensor,
        proposal_kinds: Tensor,
        dist_index: Tensor,
        target: Distribution,
        draft: Distribution | None,
        token_ids: Tensor | None,
        score_only: Tensor | None,
        seeds: Tensor,
        root_positions: Tensor,
        uniforms: Tensor | None = None,
        race: tuple[Tensor, Tensor] | None = None,
        *,
        max_depth: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        tree = (tokens, offsets, first_child, next_sibling, proposal_kinds, dist_index)
        try:
            return operator(
                *tree, *target, *(draft or _NO_DIST), token_ids, score_only, seeds, root_positions, uniforms,
                *(race or _NO_RACE), max_depth,
            )  # fmt: skip
        except (RuntimeError, ValueError, TypeError):
            noise = (seeds, root_positions, uniforms, race)
            check(*tree, target, draft, token_ids, score_only, *noise, max_depth=max_depth)
            parts = (*tree, *target, *(draft or _NO_DIST), token_ids, score_only, *noise[:3], *(race or _NO_RACE))
            return operator(*argument_checks.make_contiguous(*parts), max_depth)

    return verify


def thresholds_with(operator: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    """A *_thresholds over a C++ operator."""

    def thresholds(
        tokens: Tensor,
        offsets: Tensor,
        first_child: Tensor,
        next_sibling: Tensor,
        proposal_kinds: Tensor,
        dist_index: Tensor,
        target: Distribution,
        draft: Distribution | None,
        token_ids: Tensor | None,
        score_only: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        tree = (tokens, offsets, first_child, next_sibling, proposal_kinds, dist_index)
        try:
            return operator(*tree, *target, *(draft or _NO_DIST), token_ids, score_only)
        except (RuntimeError, ValueError, TypeError):
            check(*tree, target, draft, token_ids, score_only)
            return operator(
                *argument_checks.make_contiguous(*tree, *target, *(draft or _NO_DIST), token_ids, score_only)
            )

    return thresholds
