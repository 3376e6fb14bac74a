"""Token: speculative sampling on chains (Leviathan et al. 2023, Algorithm 1; Chen et al. 2023, Algorithm 2).

Accept a drafted token x while u < p(x)/q(x); at the first failure emit a token of the residual (p - q)+, else a bonus
token of p. Chosen tokens are point masses (q = 1). Uses fresh keyed coins, so the law is exact but the text depends
on the draft. Tests: tests/rules/test_token.py, tests/kernels/test_chain_verify.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from specdec_fast.draft import Draft
from specdec_fast.interfaces import Acceptance, Needs, Rng
from specdec_fast.laws import Laws, PendingLaws
from specdec_fast.sampling import SamplingParams
from specdec_kernels import TreePlan, chain_thresholds, chain_verify, chain_verify_logits


def verify_chains(rule: str, draft: Draft, target_laws: Laws, rng: Rng, uniforms: Tensor | None) -> Acceptance:
    """The rule "token" or "block" on chains. Of laws that nobody has looked at yet it finds what it needs."""
    nodes, laws, token_ids = _proposals(rule, draft)
    noise = (laws, token_ids, rng.seeds, rng.positions)
    if uniforms is None and isinstance(target_laws, PendingLaws):
        path, accepted, following, *found = chain_verify_logits(
            *nodes, target_laws.logits, target_laws.asked, *noise, max_depth=draft.max_depth, rule=rule
        )
        target_laws.settle(found)
    else:
        target = (target_laws.logits, *target_laws.stats)
        options = {"mass": target_laws.mass, "overlay": target_laws.overlay, "max_depth": draft.max_depth}
        path, accepted, following = chain_verify(*nodes, target, *noise, uniforms=uniforms, rule=rule, **options)
    return Acceptance(path, accepted, following)


def chain_coins(rule: str, draft: Draft, target_laws: Laws) -> tuple[Tensor, Tensor]:
    """Accept thresholds [M] and residual weights [M, V] of the rule "token" or "block" (`chain_thresholds`)."""
    nodes, laws, token_ids = _proposals(rule, draft)
    target = (target_laws.logits, *target_laws.stats)
    return chain_thresholds(*nodes, target, laws, token_ids, rule=rule, overlay=target_laws.overlay)


def _proposals(rule: str, draft: Draft) -> tuple[tuple[Tensor, ...], Any, Tensor | None]:
    """A draft of chains as the operators take it: nodes, laws, ids. Raises ValueError for trees and scouts."""
    if not draft.is_chain:
        raise ValueError(f"rule {rule}: got a tree; expected chains (every node's parent is the node before it)")
    if draft.scouts is not None:
        raise ValueError(f"rule {rule}: got scouts; expected chains in which every node is a proposal; use rule tree")
    nodes = (draft.tokens, draft.offsets, draft.drawn, draft.law_row)
    laws = draft.laws
    return nodes, None if laws is None else (laws.logits, *laws.stats), None if laws is None else laws.token_ids


@dataclass(frozen=True, slots=True)
class Token:
    """Chains, chosen or drawn."""

    name: str = "token"
    lossless: bool = True
    replays: bool = False
    uses_q: bool = True
    prefers: str = "drawn"
    from_leaves: bool = False

    def why_not(self, needs: Needs) -> str | None:
        if needs.topology != "chain":
            return "rule token: got a drafter that proposes trees; expected chains"
        return None

    def why_not_sampling(self, params: SamplingParams) -> str | None:
        return None

    def __call__(
        self, draft: Draft, plan: TreePlan, target_laws: Laws, rng: Rng, uniforms: Tensor | None = None
    ) -> Acceptance:
        return verify_chains(self.name, draft, target_laws, rng, uniforms)

    def thresholds(self, draft: Draft, plan: TreePlan, target_laws: Laws) -> tuple[Tensor, Tensor]:
        """Accept thresholds [M] and residual weights [M, V] (`chain_thresholds`); node i follows node i - 1."""
        return chain_coins(self.name, draft, target_laws)


RULE = Token()
