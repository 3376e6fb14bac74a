"""Token: speculative sampling on chains (Leviathan et al. 2023, Algorithm 1; Chen et al. 2023, Algorithm 2).

Accept a drafted token x while u < p(x)/q(x); at the first failure emit a token of the residual (p - q)+, else a bonus
token of p. Chosen tokens are point masses (q = 1). Uses fresh keyed coins, so the law is exact but the text depends
on the draft. Tests: tests/rules/test_token.py, tests/kernels/test_chain_verify.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from specdec_fast.draft import Draft, Laws
from specdec_fast.interfaces import Acceptance, Needs, Rng
from specdec_fast.sampling import SamplingParams
from specdec_kernels import TreePlan, chain_verify


@dataclass(frozen=True, slots=True)
class Token:
    """Chains, chosen or drawn."""

    name: str = "token"
    lossless: bool = True
    prefers: str = "drawn"

    def why_not(self, needs: Needs) -> str | None:
        if needs.topology != "chain":
            return "rule token: got a drafter that proposes trees; expected chains, or another rule (replay)"
        return None

    def why_not_sampling(self, params: SamplingParams) -> str | None:
        return None

    def __call__(self, draft: Draft, plan: TreePlan, target_laws: Laws, rng: Rng) -> Acceptance:
        if not draft.is_chain:
            raise ValueError("rule token: got a tree; expected chains (every node's parent is the node before it)")
        path, accepted, following = chain_verify(
            draft.tokens,
            draft.offsets,
            draft.drawn,
            draft.law_row,
            (target_laws.logits, *target_laws.stats),
            None if draft.laws is None else (draft.laws.logits, *draft.laws.stats),
            None if draft.laws is None else draft.laws.token_ids,
            rng.seeds,
            rng.positions,
            max_depth=draft.max_depth,
        )
        return Acceptance(path, accepted, following)


RULE = Token()
