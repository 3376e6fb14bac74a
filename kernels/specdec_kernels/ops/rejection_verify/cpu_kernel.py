"""C++ backend of rejection_verify and rejection_thresholds.

A call takes microseconds, so arguments are bundled for checks only, after the operator has refused them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...dispatch import argument_checks
from .._proposals.verify_arguments import NO_DISTRIBUTION, NO_NOISE, Distribution, DraftChains, Randomness, bind_chains
from ..distribution_stats.cpu_kernel import distribution_stats
from .checks import BLOCK_RULE, REJECTION, check

_rejection_verify = torch.ops.specdec.rejection_verify.default
_rejection_verify_logits = torch.ops.specdec.rejection_verify_logits.default
_rejection_thresholds = torch.ops.specdec.rejection_thresholds.default
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
    gumbel_noise: tuple[Tensor, Tensor] | None = None,
    *,
    max_depth: int,
    rule: str = REJECTION,
    mass: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Calls the C++ operator. Arguments that it refuses are checked here, then passed again in contiguous memory."""
    try:
        return _rejection_verify(
            tokens, offsets, proposal_kinds, dist_index, *target, *(draft or NO_DISTRIBUTION), token_ids, seeds,
            root_positions, uniforms, *(gumbel_noise or NO_NOISE), max_depth, _IS_BLOCK[rule], mass,
        )  # fmt: skip
    except (RuntimeError, ValueError, TypeError, KeyError):
        chains, randomness = bind_chains(
            tokens, offsets, proposal_kinds, dist_index, target, draft, token_ids, seeds, root_positions, uniforms,
            gumbel_noise,
        )  # fmt: skip
        check("rejection_verify", chains, randomness, max_depth=max_depth, rule=rule, mass=mass)  # names a remedy
        parts = argument_checks.make_contiguous(*chains.flat(), *randomness.flat())
        return _rejection_verify(*parts, max_depth, _IS_BLOCK[rule], *argument_checks.make_contiguous(mass))


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
    """Calls the C++ operator. Arguments that it refuses are checked here, then passed again in contiguous memory."""
    parts = (
        tokens, offsets, proposal_kinds, dist_index, logits, *sampling, *(draft or NO_DISTRIBUTION), token_ids, seeds,
        root_positions,
    )  # fmt: skip
    try:
        return _rejection_verify_logits(*parts, max_depth, _IS_BLOCK[rule])
    except (RuntimeError, ValueError, TypeError, KeyError):
        inv_t, lse, cut, tie_id = distribution_stats(logits, *sampling)  # names a remedy, like the check below
        target = (logits, inv_t, lse, cut, tie_id)
        chains = DraftChains(tokens, offsets, proposal_kinds, dist_index, target, draft, token_ids)
        randomness = Randomness(seeds, root_positions, None, None)
        check("rejection_verify", chains, randomness, max_depth=max_depth, rule=rule)
        return _rejection_verify_logits(*argument_checks.make_contiguous(*parts), max_depth, _IS_BLOCK[rule])


def rejection_thresholds(*args: Any, rule: str = REJECTION, **named: Any) -> tuple[Tensor, Tensor]:
    """Runs the operator. Parameters are those of `DraftChains`."""
    chains = DraftChains(*args, **named)
    try:
        return _rejection_thresholds(*chains.flat(), _IS_BLOCK[rule])
    except (RuntimeError, ValueError, TypeError, KeyError):
        check("rejection_thresholds", chains, rule=rule)  # names a remedy
        return _rejection_thresholds(*argument_checks.make_contiguous(*chains.flat()), _IS_BLOCK[rule])
