"""C++ backend of chain_verify and chain_thresholds."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import expect
from ..law_stats.cpu_kernel import law_stats
from .reference import BLOCK_RULE, TOKEN, Law, check

_chain_verify = torch.ops.specdec.chain_verify.default
_chain_verify_logits = torch.ops.specdec.chain_verify_logits.default
_chain_thresholds = torch.ops.specdec.chain_thresholds.default
_NO_LAW = (None, None, None, None, None)
_NO_RACE = (None, None)
_IS_BLOCK = {TOKEN: False, BLOCK_RULE: True}


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
    rule: str = TOKEN,
    mass: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    try:
        return _chain_verify(
            tokens, offsets, drawn, law_row, *target, *(draft or _NO_LAW), token_ids, seeds, root_positions,
            uniforms, *(race or _NO_RACE), max_depth, _IS_BLOCK[rule], mass,
        )  # fmt: skip
    except (RuntimeError, ValueError, TypeError, KeyError):
        chain = (tokens, offsets, drawn, law_row)
        check(
            *chain, target, draft, token_ids, seeds, root_positions, uniforms, race,
            max_depth=max_depth, rule=rule, mass=mass,
        )  # fmt: skip  # raises with a remedy
        parts = (*chain, *target, *(draft or _NO_LAW), token_ids, seeds, root_positions, uniforms)
        known = None if mass is None else mass.contiguous()
        return _chain_verify(*expect.contiguous(*parts, *(race or _NO_RACE)), max_depth, _IS_BLOCK[rule], known)


def chain_verify_logits(
    tokens: Tensor,
    offsets: Tensor,
    drawn: Tensor,
    law_row: Tensor,
    logits: Tensor,
    sampling: tuple[Tensor, Tensor, Tensor, Tensor],
    draft: Law | None,
    token_ids: Tensor | None,
    seeds: Tensor,
    root_positions: Tensor,
    *,
    max_depth: int,
    rule: str = TOKEN,
) -> tuple[Tensor, ...]:
    parts = (tokens, offsets, drawn, law_row, logits, *sampling, *(draft or _NO_LAW), token_ids, seeds, root_positions)
    try:
        return _chain_verify_logits(*parts, max_depth, _IS_BLOCK[rule])
    except (RuntimeError, ValueError, TypeError, KeyError):
        inv_t, lse, cut, tie_id = law_stats(logits, *sampling)  # raises with a remedy, as the next line does
        check(
            tokens, offsets, drawn, law_row, (logits, inv_t, lse, cut, tie_id), draft, token_ids, seeds, root_positions,
            max_depth=max_depth, rule=rule,
        )  # fmt: skip
        return _chain_verify_logits(*expect.contiguous(*parts), max_depth, _IS_BLOCK[rule])


def chain_thresholds(
    tokens: Tensor,
    offsets: Tensor,
    drawn: Tensor,
    law_row: Tensor,
    target: Law,
    draft: Law | None,
    token_ids: Tensor | None,
    *,
    rule: str = TOKEN,
) -> tuple[Tensor, Tensor]:
    try:
        return _chain_thresholds(
            tokens, offsets, drawn, law_row, *target, *(draft or _NO_LAW), token_ids, _IS_BLOCK[rule]
        )  # fmt: skip
    except (RuntimeError, ValueError, TypeError, KeyError):
        chain = (tokens, offsets, drawn, law_row)
        check(*chain, target, draft, token_ids, rule=rule)  # raises with a remedy
        parts = expect.contiguous(*chain, *target, *(draft or _NO_LAW), token_ids)
        return _chain_thresholds(*parts, _IS_BLOCK[rule])
