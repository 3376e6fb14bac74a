"""C++ backend of rejection_verify and rejection_thresholds."""

from __future__ import annotations

import torch
from torch import Tensor

from ...dispatch import argument_checks
from ..distribution_stats.cpu_kernel import distribution_stats
from .reference import BLOCK_RULE, REJECTION, Distribution, check

_rejection_verify = torch.ops.specdec.rejection_verify.default
_rejection_verify_logits = torch.ops.specdec.rejection_verify_logits.default
_rejection_thresholds = torch.ops.specdec.rejection_thresholds.default
_NO_DIST = (None, None, None, None, None)
_NO_RACE = (None, None)
_IS_BLOCK = {REJECTION: False, BLOCK_RULE: True}


def rejection_verify(
    tokens: Tensor,
    offsets: Tensor,
    proposal_kinds: Tensor,
    dist_index: Tensor,
    target: Distribution,
    draft: Distribution | None,
    token_ids: Tensor | None,
    seeds: Tensor,
    root_positions: Tensor,
    uniforms: Tensor | None = None,
    race: tuple[Tensor, Tensor] | None = None,
    *,
    max_depth: int,
    rule: str = REJECTION,
    mass: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    try:
        return _rejection_verify(
            tokens, offsets, proposal_kinds, dist_index, *target, *(draft or _NO_DIST), token_ids, seeds,
            root_positions,
            uniforms, *(race or _NO_RACE), max_depth, _IS_BLOCK[rule], mass,
        )  # fmt: skip
    except (RuntimeError, ValueError, TypeError, KeyError):
        chain = (tokens, offsets, proposal_kinds, dist_index)
        check(
            *chain, target, draft, token_ids, seeds, root_positions, uniforms, race,
            max_depth=max_depth, rule=rule, mass=mass,
        )  # fmt: skip  # raises with a remedy
        parts = (*chain, *target, *(draft or _NO_DIST), token_ids, seeds, root_positions, uniforms)
        known = None if mass is None else mass.contiguous()
        return _rejection_verify(
            *argument_checks.make_contiguous(*parts, *(race or _NO_RACE)), max_depth, _IS_BLOCK[rule], known
        )


def rejection_verify_logits(
    tokens: Tensor,
    offsets: Tensor,
    proposal_kinds: Tensor,
    dist_index: Tensor,
    logits: Tensor,
    sampling: tuple[Tensor, Tensor, Tensor, Tensor],
    draft: Distribution | None,
    token_ids: Tensor | None,
    seeds: Tensor,
    root_positions: Tensor,
    *,
    max_depth: int,
    rule: str = REJECTION,
) -> tuple[Tensor, ...]:
    parts = (
        tokens,
        offsets,
        proposal_kinds,
        dist_index,
        logits,
        *sampling,
        *(draft or _NO_DIST),
        token_ids,
        seeds,
        root_positions,
    )
    try:
        return _rejection_verify_logits(*parts, max_depth, _IS_BLOCK[rule])
    except (RuntimeError, ValueError, TypeError, KeyError):
        inv_t, lse, cut, tie_id = distribution_stats(logits, *sampling)  # raises with a remedy, as the next line does
        check(
            tokens, offsets, proposal_kinds, dist_index, (logits, inv_t, lse, cut, tie_id), draft, token_ids, seeds,
            root_positions,
            max_depth=max_depth, rule=rule,
        )  # fmt: skip
        return _rejection_verify_logits(*argument_checks.make_contiguous(*parts), max_depth, _IS_BLOCK[rule])


def rejection_thresholds(
    tokens: Tensor,
    offsets: Tensor,
    proposal_kinds: Tensor,
    dist_index: Tensor,
    target: Distribution,
    draft: Distribution | None,
    token_ids: Tensor | None,
    *,
    rule: str = REJECTION,
) -> tuple[Tensor, Tensor]:
    try:
        return _rejection_thresholds(
            tokens, offsets, proposal_kinds, dist_index, *target, *(draft or _NO_DIST), token_ids, _IS_BLOCK[rule]
        )  # fmt: skip
    except (RuntimeError, ValueError, TypeError, KeyError):
        chain = (tokens, offsets, proposal_kinds, dist_index)
        check(*chain, target, draft, token_ids, rule=rule)  # raises with a remedy
        parts = argument_checks.make_contiguous(*chain, *target, *(draft or _NO_DIST), token_ids)
        return _rejection_thresholds(*parts, _IS_BLOCK[rule])
