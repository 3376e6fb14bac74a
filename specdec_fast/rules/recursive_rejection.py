"""Tree: ordered proposals on trees, tested one after another at every node (research literature: recursive rejection).

A node's children are tested in index order, each against the conditional distribution it was drawn from: SpecInfer's
independent siblings (Miao et al. 2024, algorithm 2), siblings without replacement (Jeon et al. 2024; Chen et al.
2024, Sequoia, algorithm 2), point masses, and hybrid nodes (Hu et al. 2025); any mixture in one node. On chains this
is rule rejection. Tests: tests/rules/test_recursive_rejection.py, tests/kernels/test_recursive_rejection_verify.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from specdec_fast.core.distributions import TokenDistributions
from specdec_fast.core.draft import Draft
from specdec_fast.interfaces import Acceptance, Needs, Rng
from specdec_fast.sampling.params import SamplingParams
from specdec_kernels import TreePlan, recursive_rejection_thresholds, recursive_rejection_verify


def proposals(draft: Draft, plan: TreePlan, target_dists: TokenDistributions) -> tuple[Any, ...]:
    """A draft and its distributions as the operators on ordered proposals take them."""
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


@dataclass(frozen=True, slots=True)
class TreeRule:
    """A rule over one of the operators on ordered proposals: any tree, any proposal distribution, any temperature."""

    name: str
    verify: Callable[..., Any]
    weigh: Callable[..., Any]
    lossless: bool = True
    replays: bool = False
    uses_q: bool = True
    prefers: str = "sampled"
    from_leaves: bool = False

    def why_not(self, needs: Needs) -> str | None:
        return None

    def why_not_sampling(self, params: SamplingParams) -> str | None:
        return None

    def __call__(
        self, draft: Draft, plan: TreePlan, target_dists: TokenDistributions, rng: Rng, uniforms: Tensor | None = None
    ) -> Acceptance:
        draft.check_no_dropped_samples(self.name)
        path, accepted, following = self.verify(
            *proposals(draft, plan, target_dists),
            rng.seeds,
            rng.positions,
            uniforms=uniforms,
            max_depth=draft.max_depth,
            overlay=target_dists.overlay,
        )
        return Acceptance(path, accepted, following)

    def thresholds(self, draft: Draft, plan: TreePlan, target_dists: TokenDistributions) -> tuple[Tensor, Tensor]:
        """Accept thresholds [M] and residual weights [M, V], as the operator's *_thresholds defines them."""
        return self.weigh(*proposals(draft, plan, target_dists), overlay=target_dists.overlay)


RULE = TreeRule("recursive_rejection", recursive_rejection_verify, recursive_rejection_thresholds)
