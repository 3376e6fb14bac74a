"""Argument checks of rejection_verify and rejection_thresholds, and the names of the rules.

Tests: tests/kernels/test_rejection_verify.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...dispatch import argument_checks
from .._proposals.checks import check_draft, check_proposals, check_randomness, check_token_ids
from .._proposals.verify_arguments import DraftChains, Randomness
from .reference_thresholds import ChainNodes

REJECTION, BLOCK_RULE = "rejection", "block"
"""Names of the rules."""


def check(
    op: str,
    chains: DraftChains,
    randomness: Randomness | None = None,
    *,
    max_depth: int | None = None,
    rule: str = REJECTION,
    mass: Tensor | None = None,
) -> None:
    """Checks the arguments of a verify operator on draft chains.

    Args:
        op: Operator that errors name.
        chains: Draft chains.
        randomness: Random draws or keys; read if `max_depth` is given.
        max_depth: Capacity of a path, or None for operators without randomness.
        rule: Name of the rule.
        mass: Block masses of the target's distributions, or None.

    Raises:
        ValueError: If `op` cannot take the arguments.
    """
    if rule not in (REJECTION, BLOCK_RULE):
        raise ValueError(f"{op}: rule is {rule!r}; expected {REJECTION!r} or {BLOCK_RULE!r}")
    nodes = argument_checks.check_tensor(op, "tokens", chains.tokens, torch.int64, "M").shape[0]
    argument_checks.check_offsets(op, chains.offsets, nodes)
    batch = chains.offsets.shape[0] - 1
    argument_checks.check_tensor(op, "proposal_kinds", chains.proposal_kinds, torch.int8, nodes)
    argument_checks.check_tensor(op, "dist_index", chains.dist_index, torch.int32, nodes)
    vocab_size = argument_checks.check_dist(op, "target", chains.target, nodes)[0].shape[1]
    argument_checks.check_block_masses(op, mass, chains.target)
    dists = check_draft(op, chains.draft, chains.token_ids, vocab_size)
    if max_depth is not None:
        assert randomness is not None
        check_randomness(op, randomness, batch, nodes, vocab_size)
        argument_checks.check_max_depth(op, max_depth)
    if argument_checks.can_read_values(chains.tokens):
        _check_values(op, chains, vocab_size, dists, max_depth)


def _check_values(op: str, chains: DraftChains, vocab_size: int, dists: int, max_depth: int | None) -> None:
    """Checks the values of the tensors; see `check`. dists: number of draft distributions."""
    offsets = chains.offsets
    inner = ChainNodes.of(offsets, len(chains.tokens)).place > 0
    kinds, rows = chains.proposal_kinds, chains.dist_index
    check_proposals(op, chains.tokens, inner, kinds, rows, vocab_size, dists, all_kinds=False)
    if chains.draft is not None and chains.token_ids is not None:
        check_token_ids(op, chains.token_ids, vocab_size)
    longest = int((offsets[1:] - offsets[:-1]).max()) - 1 if len(offsets) > 1 else 0
    if max_depth is not None and longest > max_depth:
        raise ValueError(
            f"{op}: a row has {longest} draft tokens; expected at most max_depth = {max_depth}; all sampled tokens "
            "must be verified, so pass a larger max_depth"
        )
