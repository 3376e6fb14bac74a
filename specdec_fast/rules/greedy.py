"""Greedy: accept iff the drafted token is the target's arg-max (Stern et al. 2018, section 3). Temperature 0 only.

Every rule does the same at T = 0; this one says so and reads the arg-max only. Tests: tests/rules/test_greedy.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from specdec_fast.core.distributions import PendingDistributions, TokenDistributions
from specdec_fast.core.draft import Draft
from specdec_fast.interfaces import Acceptance, Needs, Rng
from specdec_fast.rules.replay import walk, walk_logits
from specdec_fast.sampling.params import SamplingParams
from specdec_kernels import TreePlan


@dataclass(frozen=True, slots=True)
class Greedy:
    """Any tree; refuses requests with a temperature."""

    name: str = "greedy"
    lossless: bool = True
    replays: bool = True
    uses_q: bool = False
    prefers: str = "greedy"

    def why_not(self, needs: Needs) -> str | None:
        return None

    def why_not_sampling(self, params: SamplingParams) -> str | None:
        if params.temperature > 0:
            return f"rule greedy: got temperature {params.temperature}; expected 0, or another rule (replay, token)"
        return None

    def __call__(self, draft: Draft, plan: TreePlan, target_dists: TokenDistributions, rng: Rng) -> Acceptance:
        if isinstance(target_dists, PendingDistributions):
            return walk_logits(draft, plan, target_dists, rng)
        return walk(draft, plan, target_dists.tie_id.long())


RULE = Greedy()
