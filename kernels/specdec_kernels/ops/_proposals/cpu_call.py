"""Calls of the C++ operators on ordered proposals: all take the same arguments.

A call takes microseconds, so arguments are bundled for checks only, after the operator has refused them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ...dispatch import argument_checks
from .verify_arguments import NO_DISTRIBUTION, NO_NOISE, Distribution, DraftTrees, bind_trees


def verify_with(operator: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    """Makes a *_verify over a C++ operator; `check` raises with a remedy for arguments that the operator rejects."""

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
        gumbel_noise: tuple[Tensor, Tensor] | None = None,
        *,
        max_depth: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        try:
            return operator(
                tokens, offsets, first_child, next_sibling, proposal_kinds, dist_index, *target,
                *(draft or NO_DISTRIBUTION), token_ids, score_only, seeds, root_positions, uniforms,
                *(gumbel_noise or NO_NOISE), max_depth,
            )  # fmt: skip
        except (RuntimeError, ValueError, TypeError):
            trees, randomness = bind_trees(
                tokens, offsets, first_child, next_sibling, proposal_kinds, dist_index, target, draft, token_ids,
                score_only, seeds, root_positions, uniforms, gumbel_noise,
            )  # fmt: skip
            check(trees, randomness, max_depth=max_depth)
            return operator(*argument_checks.make_contiguous(*trees.flat(), *randomness.flat()), max_depth)

    return verify


def thresholds_with(operator: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    """Makes a *_thresholds over a C++ operator."""

    def thresholds(*args: Any, **named: Any) -> tuple[Tensor, Tensor]:
        trees = DraftTrees(*args, **named)
        try:
            return operator(*trees.flat())
        except (RuntimeError, ValueError, TypeError):
            check(trees)
            return operator(*argument_checks.make_contiguous(*trees.flat()))

    return thresholds
