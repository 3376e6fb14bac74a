"""Best: the lossless rule that accepts the most expected tokens for what a drafter does. `Best.pick` says why.

For a drafted chain of drawn tokens that is block verification (Sun et al. 2025; optimal for one path by Thomas and Pal
2026), for a tree of them traversal verification (Weng et al. 2025). Where no token is drawn, a lossless rule accepts x
with probability p(x), unless the drafter knows the noise, which it does for replay. An engine asked for `best` runs the
rule that was picked. Tests: tests/rules/test_best.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from specdec_fast.draft import Draft
from specdec_fast.interfaces import Acceptance, Needs, Rng, Rule
from specdec_fast.laws import Laws
from specdec_fast.rules import get_rule, traversal
from specdec_fast.sampling import SamplingParams
from specdec_kernels import TreePlan


class Choice(NamedTuple):
    """A rule, and why it was picked, in one sentence."""

    rule: Rule
    why: str


@dataclass(frozen=True, slots=True)
class Best:
    """Picks by capabilities, never by drafted tokens: a choice that looked at them would change the law.

    Called without having picked, it is rule traversal, which takes every draft.
    """

    name: str = "best"
    lossless: bool = True
    replays: bool = False
    uses_q: bool = True
    prefers: str = "drawn"

    def pick(self, needs: Needs, temperature: float | None = None) -> Choice:
        """The rule for a drafter, and why. temperature: that of all requests, None where they differ or are unknown."""
        if temperature == 0:
            return Choice(
                get_rule("greedy"),
                "at temperature 0 every rule keeps exactly the target's arg-max; greedy reads nothing else",
            )
        if not needs.laws:
            return Choice(
                get_rule("replay"),
                "the drafter chooses its tokens; for replay it may choose them by the noise that "
                "the target will use, and the text depends on the seed alone",
            )
        if needs.topology == "chain":
            return Choice(
                get_rule("block"),
                "the drafter draws chains; block verification accepts the most tokens of a drawn chain that any "
                "lossless rule can, at least as many as token",
            )
        return Choice(
            get_rule("traversal"),
            "the drafter draws trees; traversal verification accepts at least as many tokens as rule tree, and takes "
            "every proposal law",
        )

    def why_not(self, needs: Needs) -> str | None:
        return None

    def why_not_sampling(self, params: SamplingParams) -> str | None:
        return None

    def __call__(
        self, draft: Draft, plan: TreePlan, target_laws: Laws, rng: Rng, uniforms: Tensor | None = None
    ) -> Acceptance:
        return traversal.RULE(draft, plan, target_laws, rng, uniforms)

    def thresholds(self, draft: Draft, plan: TreePlan, target_laws: Laws) -> tuple[Tensor, Tensor]:
        """Those of rule traversal."""
        return traversal.RULE.thresholds(draft, plan, target_laws)


RULE = Best()
