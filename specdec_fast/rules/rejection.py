"""Speculative sampling on chains: the rejection rule of the first papers.

A draft token x is accepted if u < p(x) / q(x). The first rejected token is replaced by a recovered token from the
residual (p - q)+; if all are accepted, a bonus token of p follows. Deterministic tokens are point masses (q = 1).
Uniforms are keyed and fresh, so the distribution is exact, but the text depends on the draft.
Tests: tests/rules/test_rejection.py, tests/kernels/test_rejection_verify.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from specdec_fast.core.distributions import PendingDistributions, TokenDistributions
from specdec_fast.core.draft import Draft
from specdec_fast.interfaces import Acceptance, Needs, Rng, ThresholdRule
from specdec_kernels import TreePlan, rejection_thresholds, rejection_verify, rejection_verify_logits


def verify_chains(
    rule: str, draft: Draft, target_dists: TokenDistributions, rng: Rng, uniforms: Tensor | None
) -> Acceptance:
    """Verifies chains by rule `rejection` or `block`.

    Target distributions whose statistics are still pending are computed only where the rule needs them.

    Args:
        rule: "rejection" or "block".
        draft: Packed chains of M nodes.
        target_dists: The target's distribution after each node, M rows.
        rng: Keys of the random numbers, [B].
        uniforms: Uniforms of all nodes, float32 [M], in place of the keyed ones; None in an engine.

    Returns:
        The accepted path and the next token of each request.

    Raises:
        ValueError: If the draft has siblings or score-only nodes.
    """
    nodes, dists, token_ids = _chain_arguments(rule, draft)
    noise = (dists, token_ids, rng.seeds, rng.positions)
    if uniforms is None and isinstance(target_dists, PendingDistributions):
        path, accepted, following, *stats = rejection_verify_logits(
            *nodes, target_dists.logits, target_dists.sampling_args, *noise, max_depth=draft.max_depth, rule=rule
        )
        target_dists.set_stats(stats)
    else:
        target = (target_dists.logits, *target_dists.stats)
        options = {"mass": target_dists.mass, "overlay": target_dists.overlay, "max_depth": draft.max_depth}
        path, accepted, following = rejection_verify(*nodes, target, *noise, uniforms=uniforms, rule=rule, **options)
    return Acceptance(path, accepted, following)


def chain_thresholds(rule: str, draft: Draft, target_dists: TokenDistributions) -> tuple[Tensor, Tensor]:
    """Computes the thresholds of rule `rejection` or `block`.

    Args:
        rule: "rejection" or "block".
        draft: Packed chains of M nodes.
        target_dists: The target's distribution after each node, M rows.

    Returns:
        Accept thresholds [M] and residual weights [M, V], as `rejection_thresholds` defines them.

    Raises:
        ValueError: If the draft has siblings or score-only nodes.
    """
    nodes, dists, token_ids = _chain_arguments(rule, draft)
    target = (target_dists.logits, *target_dists.stats)
    return rejection_thresholds(*nodes, target, dists, token_ids, rule=rule, overlay=target_dists.overlay)


def _chain_arguments(rule: str, draft: Draft) -> tuple[tuple[Tensor, ...], Any, Tensor | None]:
    """Returns the operators' arguments for chains: nodes, draft distributions and their token ids."""
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
class Rejection(ThresholdRule):
    """Verifies chains by speculative sampling. Chains may be sampled or deterministic.

    Rule `block` inherits from this class and differs only in its name, which selects the algorithm of the operators.

    Source:
        Leviathan et al. 2023, algorithm 1; Chen et al. 2023, algorithm 2.
    """

    name: str = "rejection"
    lossless: bool = True
    replays: bool = False
    uses_q: bool = True
    prefers: str = "sampled"
    from_leaves: bool = False

    def why_not(self, needs: Needs) -> str | None:
        """Refuses drafters of trees."""
        if needs.topology != "chain":
            return f"rule {self.name}: got a drafter that proposes trees; expected chains"
        return None

    def __call__(
        self, draft: Draft, plan: TreePlan, target_dists: TokenDistributions, rng: Rng, uniforms: Tensor | None = None
    ) -> Acceptance:
        """Verifies chains, as `verify_chains` does."""
        return verify_chains(self.name, draft, target_dists, rng, uniforms)

    def thresholds(self, draft: Draft, plan: TreePlan, target_dists: TokenDistributions) -> tuple[Tensor, Tensor]:
        """Returns accept thresholds [M] and residual weights [M, V], as `chain_thresholds` does."""
        return chain_thresholds(self.name, draft, target_dists)


RULE = Rejection()
