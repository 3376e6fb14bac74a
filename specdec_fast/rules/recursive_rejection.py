"""Recursive rejection on trees: the children of a node are tested one after another.

Each child is tested against the conditional distribution that it was sampled from: independent siblings, siblings
without replacement, point masses, and hybrid nodes. One node may mix these kinds. On chains this is rule `rejection`.
Tests: tests/rules/test_recursive_rejection.py, tests/kernels/test_recursive_rejection_verify.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from specdec_fast.core.distributions import TokenDistributions
from specdec_fast.core.draft import Draft
from specdec_fast.interfaces import Acceptance, Rng, ThresholdRule
from specdec_kernels import TreePlan, recursive_rejection_thresholds, recursive_rejection_verify


def tree_arguments(draft: Draft, plan: TreePlan, target_dists: TokenDistributions) -> tuple[Any, ...]:
    """Returns the arguments of the operators on trees of proposals: nodes, links, kinds and distributions."""
    dists = draft.dists
    return (
        draft.tokens,
        draft.offsets,
        plan.first_child,
        plan.next_sibling,
        draft.proposal_kinds,
        draft.dist_index,
        (target_dists.logits, *target_dists.stats),
        None if dists is None else (dists.logits, *dists.stats),
        None if dists is None else dists.token_ids,
        draft.score_only,
    )


def verify_trees(
    operator: Callable[..., Any],
    rule: str,
    draft: Draft,
    plan: TreePlan,
    target_dists: TokenDistributions,
    rng: Rng,
    uniforms: Tensor | None,
) -> Acceptance:
    """Verifies trees by `recursive_rejection_verify` or `traversal_verify`.

    Args:
        operator: The operator.
        rule: Name of the rule, for messages.
        draft: Packed trees of M nodes.
        plan: Depths, ancestors and links of the nodes.
        target_dists: The target's distribution after each node, M rows.
        rng: Keys of the random numbers, [B].
        uniforms: Uniforms of all nodes, float32 [M], in place of the keyed ones; None in an engine.

    Returns:
        The accepted path and the next token of each request.

    Raises:
        ValueError: If a sampled token is a score-only node.
    """
    draft.check_no_dropped_samples(rule)
    path, accepted, following = operator(
        *tree_arguments(draft, plan, target_dists),
        rng.seeds,
        rng.positions,
        uniforms=uniforms,
        max_depth=draft.max_depth,
        overlay=target_dists.overlay,
    )
    return Acceptance(path, accepted, following)


@dataclass(frozen=True, slots=True)
class RecursiveRejection(ThresholdRule):
    """Verifies trees from the root: any tree, any proposal distribution, any temperature.

    Source:
        Miao et al. 2024 (SpecInfer), algorithm 2, for independent siblings; Jeon et al. 2024 and Chen et al. 2024
        (Sequoia), algorithm 2, for siblings without replacement; Hu et al. 2025 for hybrid nodes.
    """

    name: str = "recursive_rejection"
    lossless: bool = True
    replays: bool = False
    uses_q: bool = True
    prefers: str = "sampled"
    from_leaves: bool = False

    def __call__(
        self, draft: Draft, plan: TreePlan, target_dists: TokenDistributions, rng: Rng, uniforms: Tensor | None = None
    ) -> Acceptance:
        """Verifies trees by `recursive_rejection_verify`."""
        return verify_trees(recursive_rejection_verify, self.name, draft, plan, target_dists, rng, uniforms)

    def thresholds(self, draft: Draft, plan: TreePlan, target_dists: TokenDistributions) -> tuple[Tensor, Tensor]:
        """Returns accept thresholds [M] and residual weights [M, V] (`recursive_rejection_thresholds`)."""
        arguments = tree_arguments(draft, plan, target_dists)
        return recursive_rejection_thresholds(*arguments, overlay=target_dists.overlay)


RULE = RecursiveRejection()
