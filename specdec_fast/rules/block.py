"""Block verification of chains. Accepts at least as many tokens as rule `rejection`.

The path ends at the last node whose uniform passes, whatever the earlier uniforms are. The thresholds consider the
chain as a whole: at least i tokens are kept with probability w_i = min(1, w_{i-1} p/q). Deterministic tokens are point
masses (q = 1), where the rule gains nothing. Uniforms are keyed and fresh, so the distribution is exact, but the text
depends on the draft. Tests: tests/rules/test_block.py, tests/kernels/test_rejection_verify.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from specdec_fast.core.distributions import TokenDistributions
from specdec_fast.core.draft import Draft
from specdec_fast.interfaces import Acceptance, Needs, Rng
from specdec_fast.rules.rejection import chain_thresholds, verify_chains
from specdec_fast.sampling.params import SamplingParams
from specdec_kernels import TreePlan


@dataclass(frozen=True, slots=True)
class Block:
    """Verifies chains as a whole. Chains may be sampled or deterministic.

    Source:
        Sun et al. 2025 (block verification), algorithm 2.
    """

    name: str = "block"
    lossless: bool = True
    replays: bool = False
    uses_q: bool = True
    prefers: str = "sampled"
    from_leaves: bool = True

    def why_not(self, needs: Needs) -> str | None:
        if needs.topology != "chain":
            return "rule block: got a drafter that proposes trees; expected chains"
        return None

    def why_not_sampling(self, params: SamplingParams) -> str | None:
        return None

    def __call__(
        self, draft: Draft, plan: TreePlan, target_dists: TokenDistributions, rng: Rng, uniforms: Tensor | None = None
    ) -> Acceptance:
        return verify_chains(self.name, draft, target_dists, rng, uniforms)

    def thresholds(self, draft: Draft, plan: TreePlan, target_dists: TokenDistributions) -> tuple[Tensor, Tensor]:
        """Returns accept thresholds [M] and residual weights [M, V]; nodes are tested from the last to the first."""
        return chain_thresholds(self.name, draft, target_dists)


RULE = Block()
