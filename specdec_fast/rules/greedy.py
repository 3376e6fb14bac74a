"""Greedy verification at temperature 0: a draft token is accepted if it is the target's arg-max.

Every rule behaves like this at temperature 0. This rule refuses other temperatures and uses only the arg-max.
Tests: tests/rules/test_greedy.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from specdec_fast.core.distributions import PendingDistributions, TokenDistributions
from specdec_fast.core.draft import Draft
from specdec_fast.interfaces import Acceptance, Rng, Rule
from specdec_fast.rules.replay import match_choices, sample_and_match
from specdec_fast.sampling.params import SamplingParams
from specdec_kernels import TreePlan


@dataclass(frozen=True, slots=True)
class Greedy(Rule):
    """Accepts the target's arg-max, in any tree. Refuses requests with a temperature above 0.

    Source:
        Stern et al. 2018, section 3.
    """

    name: str = "greedy"
    lossless: bool = True
    replays: bool = True
    uses_q: bool = False
    prefers: str = "greedy"

    def why_not_sampling(self, params: SamplingParams) -> str | None:
        """Refuses temperatures above 0."""
        if params.temperature > 0:
            return f"rule greedy: got temperature {params.temperature}; expected 0, or another rule (replay, rejection)"
        return None

    def __call__(self, draft: Draft, plan: TreePlan, target_dists: TokenDistributions, rng: Rng) -> Acceptance:
        """Accepts the longest path of arg-max tokens."""
        if isinstance(target_dists, PendingDistributions):
            return sample_and_match(draft, plan, target_dists, rng)
        return match_choices(draft, plan, target_dists.tie_id.long())


RULE = Greedy()
