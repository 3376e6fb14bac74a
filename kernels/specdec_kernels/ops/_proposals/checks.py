"""Argument checks of the operators on packed trees, and the proposal kinds.

Tests: tests/kernels/test_recursive_rejection_verify.py, tests/interpreter/test_bad_arguments.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...dispatch import argument_checks
from ...random import BLOCK
from .verify_arguments import DraftTrees, Randomness

DETERMINISTIC = 0
"""A point mass: the drafter chose the token without randomness."""
SAMPLED = 1
"""Sampled from its draft distribution, independently of its siblings."""
SAMPLED_WITHOUT_EARLIER = 2
"""Sampled from its draft distribution without the tokens of earlier siblings from the same row."""
SAMPLED_WITHOUT_DETERMINISTIC = 3
"""Sampled from its draft distribution without the tokens of deterministic siblings, earlier or later."""


def check_randomness(op: str, randomness: Randomness, batch: int, nodes: int, vocab_size: int) -> None:
    """Raises ValueError for random draws or keys that do not fit a batch of B rows and M nodes."""
    argument_checks.check_tensor(op, "seeds", randomness.seeds, torch.int64, batch)
    argument_checks.check_tensor(op, "root_positions", randomness.root_positions, torch.int32, batch)
    if randomness.uniforms is not None:
        argument_checks.check_tensor(op, "uniforms", randomness.uniforms, torch.float32, nodes)
    noise = randomness.gumbel_noise
    if noise is not None:
        if not isinstance(noise, (tuple, list)) or len(noise) != 2:
            raise ValueError(f"{op}: gumbel_noise is {type(noise).__name__}; expected (block noise, token noise)")
        blocks = (vocab_size + BLOCK - 1) // BLOCK
        argument_checks.check_tensor(op, "gumbel_noise of blocks", noise[0], torch.float32, batch, blocks)
        argument_checks.check_tensor(op, "gumbel_noise of tokens", noise[1], torch.float32, batch, vocab_size)


def check_draft(op: str, draft: object, token_ids: Tensor | None, vocab_size: int) -> int:
    """Checks draft distributions, or None, and returns their number of rows. Raises ValueError."""
    if draft is None:
        return 0
    dists, width = argument_checks.check_dist(op, "draft", draft, "R")[0].shape
    if token_ids is not None:
        argument_checks.check_tensor(op, "token_ids", token_ids, torch.int64, width)
    elif width > vocab_size:
        raise ValueError(
            f"{op}: draft distributions have {width} columns, target distributions {vocab_size}; expected at most as "
            "many; slice off padding or pass token_ids"
        )
    return dists


def check(op: str, trees: DraftTrees, randomness: Randomness | None = None, *, max_depth: int | None = None) -> None:
    """Raises ValueError for draft trees that `op` cannot take.

    Args:
        op: Operator that errors name.
        trees: Draft trees. Without proposal kinds, draft distributions are not checked.
        randomness: Random draws or keys; read if `max_depth` is given.
        max_depth: Capacity of a path, or None for operators without randomness.
    """
    nodes = argument_checks.check_tensor(op, "tokens", trees.tokens, torch.int64, "M").shape[0]
    argument_checks.check_offsets(op, trees.offsets, nodes)
    argument_checks.check_tensor(op, "first_child", trees.first_child, torch.int32, nodes)
    argument_checks.check_tensor(op, "next_sibling", trees.next_sibling, torch.int32, nodes)
    if trees.proposal_kinds is not None:
        argument_checks.check_tensor(op, "proposal_kinds", trees.proposal_kinds, torch.int8, nodes)
        argument_checks.check_tensor(op, "dist_index", trees.dist_index, torch.int32, nodes)
    vocab_size = argument_checks.check_dist(op, "target", trees.target, nodes)[0].shape[1]
    dists = check_draft(op, trees.draft, trees.token_ids, vocab_size)
    if trees.score_only is not None:
        argument_checks.check_tensor(op, "score_only", trees.score_only, torch.bool, nodes)
    if max_depth is not None:
        assert randomness is not None
        check_randomness(op, randomness, trees.offsets.shape[0] - 1, nodes, vocab_size)
        argument_checks.check_max_depth(op, max_depth)
    if argument_checks.can_read_values(trees.tokens):
        _check_values(op, trees, vocab_size, dists, max_depth)


def _check_values(op: str, trees: DraftTrees, vocab_size: int, dists: int, max_depth: int | None) -> None:
    """Checks the values of the tensors; see `check`. dists: number of draft distributions."""
    tokens, offsets = trees.tokens, trees.offsets
    index = torch.arange(len(tokens), device=tokens.device)
    row = torch.searchsorted(offsets.long(), index, right=True) - 1
    inside = index < offsets[-1]
    end = offsets.long()[(row + 1).clamp(max=len(offsets) - 1)]
    for name, links in (("first_child", trees.first_child), ("next_sibling", trees.next_sibling)):
        good = ~inside | (links == -1) | ((links > index) & (links < end))
        argument_checks.check_values(
            op, name, good, links, "-1 or the packed index of a later node of the row; use tree_plan's links"
        )
    linked = torch.cat([trees.first_child[inside], trees.next_sibling[inside]]).long()
    counts = torch.bincount(linked[linked >= 0], minlength=len(tokens))
    argument_checks.check_values(
        op, "first_child, next_sibling", counts <= 1, counts, "one link to a node; use tree_plan's links"
    )
    inner = inside & (index > offsets.long()[row.clamp(min=0)])
    check_proposals(op, tokens, inner, trees.proposal_kinds, trees.dist_index, vocab_size, dists, all_kinds=True)
    if trees.draft is not None and trees.token_ids is not None:
        check_token_ids(op, trees.token_ids, vocab_size)
    deepest = max(depths(offsets, trees.first_child, trees.next_sibling), default=0)
    if max_depth is not None and deepest > max_depth:
        raise ValueError(
            f"{op}: a row is {deepest} draft tokens deep; expected at most max_depth = {max_depth}; all sampled tokens "
            "must be verified, so pass a larger max_depth"
        )


def check_proposals(
    op: str,
    tokens: Tensor,
    inner: Tensor,
    proposal_kinds: Tensor | None,
    dist_index: Tensor | None,
    vocab_size: int,
    dists: int,
    all_kinds: bool,
) -> None:
    """Checks values of the nodes that are no roots.

    Args:
        op: Operator that errors name.
        tokens: int64 [M].
        inner: bool [M], nodes that are no roots.
        proposal_kinds: int8 [M], or None.
        dist_index: int32 [M], or None.
        vocab_size: Number of token ids.
        dists: Number of draft distributions.
        all_kinds: Kinds are distinguished and must exist. On chains all but 0 mean the same.
    """
    good = ~inner | ((tokens >= 0) & (tokens < vocab_size))
    argument_checks.check_values(op, "tokens", good, tokens, f"an id in [0, {vocab_size})")
    if proposal_kinds is None or dist_index is None:
        return
    if all_kinds:
        exists = ~inner | ((proposal_kinds >= 0) & (proposal_kinds <= 3))
        argument_checks.check_values(op, "proposal_kinds", exists, proposal_kinds, "a kind from 0 to 3")
    sampled = inner & (proposal_kinds != DETERMINISTIC)
    if dists == 0:
        expected = "0 (deterministic) everywhere when there are no draft distributions"
        argument_checks.check_values(op, "proposal_kinds", ~sampled, proposal_kinds, expected)
    exists = ~sampled | ((dist_index >= 0) & (dist_index < dists))
    argument_checks.check_values(op, "dist_index", exists, dist_index, f"a draft distribution in [0, {dists})")


def check_token_ids(op: str, token_ids: Tensor, vocab_size: int) -> None:
    """Checks the token ids of draft columns."""
    good = (token_ids >= 0) & (token_ids < vocab_size)
    argument_checks.check_values(op, "token_ids", good, token_ids, f"in [0, {vocab_size})")


def depths(offsets: Tensor, first_child: Tensor, next_sibling: Tensor) -> list[int]:
    """Depth of every node, on the host; 0 for tail nodes."""
    first, sibling, depth = first_child.tolist(), next_sibling.tolist(), [0] * len(first_child)
    for node in range(int(offsets[-1])):
        child = first[node]
        while child >= 0:
            depth[child] = depth[node] + 1
            child = sibling[child]
    return depth
