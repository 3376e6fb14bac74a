"""Rejection: speculative sampling on chains (Leviathan et al. 2023, Algorithm 1; Chen et al. 2023, Algorithm 2).

Accept a drafted token x while u < p(x)/q(x); at the first failure emit a token of the residual (p - q)+, else a bonus
token of p. Chosen tokens are point masses (q = 1). Uses fresh keyed coins, so the distribution is exact but the text
depends on the draft. Tests: tests/rules/test_rejection.py, tests/kernels/test_rejection_verify.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from specdec_fast.core.distributions import PendingDistributions, TokenDistributions
from specdec_fast.core.draft import Draft
from specdec_fast.interfaces import Acceptance, Needs, Rng
from specdec_fast.sampling.params import SamplingParams
from specdec_kernels import TreePlan, rejection_thresholds, rejection_verify, rejection_verify_logits


def verify_chains(
    rule: str, draft: Draft, target_dists: TokenDistributions, rng: Rng, uniforms: Tensor | None
) -> Acceptance:
    """The rule "rejection" or "block" on chains. Of distributions that nobody has looked at yet it finds what it
    needs."""
    nodes, dists, token_ids = _proposals(rule, draft)
    noise = (dists, token_ids, rng.seeds, rng.positions)
    if uniforms is None and isinstance(target_dists, PendingDistributions):
        path, accepted, following, *found = rejection_verify_logits(
            *nodes, target_dists.logits, target_dists.sampling_args, *noise, max_depth=draft.max_depth, rule=rule
        )
        target_dists.set_stats(found)
    else:
        target = (target_dists.logits, *target_dists.stats)
        options = {"mass": target_dists.mass, "overlay": target_dists.overlay, "max_depth": draft.max_depth}
        path, accepted, following = rejection_verify(*nodes, target, *noise, uniforms=uniforms, rule=rule, **options)
    return Acceptance(path, accepted, following)


def rejection_coins(rule: str, draft: Draft, target_dists: TokenDistributions) -> tuple[Tensor, Tensor]:
    """Accept thresholds [M] and residual weights [M, V] of the rule "rejection" or "block" (`rejection_thresholds`)."""
    nodes, dists, token_ids = _proposals(rule, draft)
    target = (target_dists.logits, *target_dists.stats)
    return rejection_thresholds(*nodes, target, dists, token_ids, rule=rule, overlay=target_dists.overlay)


def _proposals(rule: str, draft: Draft) -> tuple[tuple[Tensor, ...], Any, Tensor | None]:
    """A draft of chains as the operators take it: nodes, distributions, ids. Raises ValueError for trees and
    score-only nodes.
    """
    if not draft.is_chain:
        raise ValueError(f"rule {rule}: got a tree; expected chains (every node's parent is the node before it)")
    if draft.score_only is not None:
        raise ValueError(
            f"rule {rule}: got score-only nodes; expected chains in which every node is a proposal; use rule "
            f"recursive_rejection"
        )
    nodes = (draft.tokens, draft.offsets, draft.proposal_kinds, draft.dist_index)
    dists = draft.dists
    return nodes, None if dists is None else (dists.logits, *dists.stats), None if dists is None else dists.token_ids


@dataclass(frozen=True, slots=True)
class Rejection:
    """Chains, chosen or drawn."""

    name: str = "rejection"
    lossless: bool = True
    replays: bool = False
    uses_q: bool = True
    prefers: str = "sampled"
    from_leaves: bool = False

    def why_not(self, needs: Needs) -> str | None:
        if needs.topology != "chain":
            return "rule rejection: got a drafter that proposes trees; expected chains"
        return None

    def why_not_sampling(self, params: SamplingParams) -> str | None:
        return None

    def __call__(
        self, draft: Draft, plan: TreePlan, target_dists: TokenDistributions, rng: Rng, uniforms: Tensor | None = None
    ) -> Acceptance:
        return verify_chains(self.name, draft, target_dists, rng, uniforms)

    def thresholds(self, draft: Draft, plan: TreePlan, target_dists: TokenDistributions) -> tuple[Tensor, Tensor]:
        """Accept thresholds [M] and residual weights [M, V] (`rejection_thresholds`); node i follows node i - 1."""
        return rejection_coins(self.name, draft, target_dists)


RULE = Rejection()
