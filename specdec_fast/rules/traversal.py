"""Traversal verification on trees: from the leaves to the root.

The uniforms of a node's descendants are tested before its own. The node is kept whenever a descendant passes.
For the same draft it accepts at least as many tokens as rule `recursive_rejection`. On chains it is block verification
(Sun et al. 2025). The sampled child of a hybrid node should come first. Tests: tests/rules/test_traversal.py,
tests/kernels/test_traversal_verify.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from specdec_fast.core.distributions import TokenDistributions
from specdec_fast.core.draft import Draft
from specdec_fast.interfaces import Acceptance, Rng, ThresholdRule
from specdec_fast.rules.recursive_rejection import tree_arguments, verify_trees
from specdec_kernels import TreePlan, traversal_thresholds, traversal_verify


@dataclass(frozen=True, slots=True)
class Traversal(ThresholdRule):
    """Verifies trees from the leaves: any tree, any proposal distribution, any temperature.

    Source:
        Weng et al. 2025, algorithm 1.
    """

    name: str = "traversal"
    lossless: bool = True
    replays: bool = False
    uses_q: bool = True
    prefers: str = "sampled"
    from_leaves: bool = True

    def __call__(
        self, draft: Draft, plan: TreePlan, target_dists: TokenDistributions, rng: Rng, uniforms: Tensor | None = None
    ) -> Acceptance:
        """Verifies trees by `traversal_verify`."""
        return verify_trees(traversal_verify, self.name, draft, plan, target_dists, rng, uniforms)

    def thresholds(self, draft: Draft, plan: TreePlan, target_dists: TokenDistributions) -> tuple[Tensor, Tensor]:
        """Returns accept thresholds [M] and residual weights [M, V] (`traversal_thresholds`)."""
        arguments = tree_arguments(draft, plan, target_dists)
        return traversal_thresholds(*arguments, overlay=target_dists.overlay)


RULE = Traversal()
