"""Best: the lossless rule that accepts the most expected tokens for what a drafter does. `Best.pick` says why.

What is known before anything is drafted decides among rules for the same draft: for a drafted chain of drawn tokens
block verification accepts the most of any lossless rule (Sun et al. 2025; optimal for one path by Thomas and Pal 2026),
so at least as many as token, and token at least as many as replay with tokens coupled by its noise (Daliri, Musco,
Suresh 2024); for a tree of them traversal verification accepts at least as many as tree (Weng et al. 2025). Where no
token is drawn, a lossless rule accepts x with probability p(x), unless the drafter knows the noise, which it does for
replay.

Whether to draw at all is no theorem: the likeliest token of q is accepted with p of it, a drawn one with sum min(p, q),
and either may be more. `weigh` computes both, and all rules, for a draft and the target's distributions; `pick`
compares their means over the drafts of a sample (`choosing.sample_ways`) before there is an engine. It is not done
step by step: a choice that looked at drawn tokens would change the distribution, one that looked at other rows would
make texts depend on their neighbours in every step, and texts of replay are functions of their seeds only while no
other rule steps in. (Which requests are in the sample may decide which rule it is, and so the text that a seed gives;
its distribution never.) An engine asked for `best` runs the rule that was picked. Tests: tests/rules/test_best.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from specdec_fast.adaptive.expected_acceptance import expected_accepted, likeliest_accepted
from specdec_fast.core.distributions import TokenDistributions
from specdec_fast.core.draft import Draft
from specdec_fast.interfaces import Acceptance, Needs, Rng, Rule
from specdec_fast.rules import get_rule, traversal
from specdec_fast.sampling.params import SamplingParams
from specdec_kernels import TreePlan

LIKELIEST = "likeliest tokens"
"""The way to draft that `weigh` names so: chosen by q without any noise; every rule accepts as many of them."""


class Choice(NamedTuple):
    """A rule, why it was picked, in one sentence, and how the drafter should pick its tokens (`Rule.prefers`)."""

    rule: Rule
    why: str
    prefers: str


@dataclass(frozen=True, slots=True)
class Best:
    """Picks by capabilities and by a sample, never by the tokens that it then verifies: that would change the
    distribution.

    Called without having picked, it is rule traversal, which takes every draft.
    """

    name: str = "best"
    lossless: bool = True
    replays: bool = False
    uses_q: bool = True
    prefers: str = "sampled"
    from_leaves: bool = True

    def pick(
        self, needs: Needs, temperature: float | None = None, weighed: Mapping[str, float] | None = None
    ) -> Choice:
        """The rule for a drafter, and why. temperature: that of all requests, None where they differ or are unknown;
        weighed: means of `weigh` over a sample of this drafter's drafts, if there is one.
        """
        name, why = self._by_theorem(needs, temperature)
        rule = get_rule(name)
        if not weighed or not needs.dists or temperature == 0:
            return Choice(rule, why, rule.prefers)
        ranked = sorted(weighed.items(), key=lambda each: -each[1])
        found = ", ".join(f"{value:.3f} {_of(way)}" for way, value in ranked)
        numbers = f"expected accepted tokens per draft of a sample: {found}"
        if weighed[LIKELIEST] > weighed[name]:
            why = "the likeliest tokens are accepted more often than drawn ones, by all rules alike; the text of replay"
            return Choice(get_rule("replay"), f"{why} depends on the seed alone; {numbers}", "greedy")
        return Choice(rule, f"{why}; {numbers}", rule.prefers)

    def weigh(self, needs: Needs, draft: Draft, target_dists: TokenDistributions) -> dict[str, Tensor]:
        """Expected accepted tokens of a drafter's draft of drawn tokens, float64 [B]: by the rules for its drafts, by
        replay if they were coupled instead (chains; siblings have no closed form), and if they were the likeliest.
        What holds between rules holds for means over drafts, not for each draft.
        """
        names = ("block", "rejection", "replay") if needs.topology == "chain" else ("traversal", "tree")
        found = {name: expected_accepted(get_rule(name), draft, target_dists) for name in names}
        return found | {LIKELIEST: likeliest_accepted(draft, target_dists)}

    @staticmethod
    def _by_theorem(needs: Needs, temperature: float | None) -> tuple[str, str]:
        """Name of the rule that nothing beats for the draft that it prefers, and why."""
        if temperature == 0:
            return "greedy", "at temperature 0 every rule keeps exactly the target's arg-max; greedy reads nothing else"
        if not needs.dists:
            return (
                "replay",
                "the drafter chooses its tokens; for replay it may choose them by the noise that the target will use, "
                "and the text depends on the seed alone",
            )
        if needs.topology == "chain":
            return (
                "block",
                "the drafter draws chains; block verification accepts the most tokens of a drawn chain that any "
                "lossless rule can, at least as many as token",
            )
        return (
            "traversal",
            "the drafter draws trees; traversal verification accepts at least as many tokens as rule "
            "recursive_rejection, and takes "
            "every proposal distribution",
        )

    def why_not(self, needs: Needs) -> str | None:
        return None

    def why_not_sampling(self, params: SamplingParams) -> str | None:
        return None

    def __call__(
        self, draft: Draft, plan: TreePlan, target_dists: TokenDistributions, rng: Rng, uniforms: Tensor | None = None
    ) -> Acceptance:
        return traversal.RULE(draft, plan, target_dists, rng, uniforms)

    def thresholds(self, draft: Draft, plan: TreePlan, target_dists: TokenDistributions) -> tuple[Tensor, Tensor]:
        """Those of rule traversal."""
        return traversal.RULE.thresholds(draft, plan, target_dists)


def _of(way: str) -> str:
    """A way of `weigh` in words."""
    return {"replay": "coupled, by replay", LIKELIEST: f"of the {LIKELIEST}"}.get(way, f"sampled, by {way}")


RULE = Best()
