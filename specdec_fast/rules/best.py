"""Chooses the lossless rule with the most expected accepted tokens for a drafter.

The drafter's capabilities decide between rules for the same kind of draft:

- Sampled chains: block verification accepts the most tokens of all lossless rules (Sun et al. 2025; optimal for one
  path by Thomas and Pal 2026). It accepts at least as many as `rejection`, and `rejection` at least as many as
  `replay` with tokens coupled by its noise (Daliri, Musco, Suresh 2024).
- Sampled trees: traversal verification accepts at least as many tokens as `recursive_rejection` (Weng et al. 2025).
- Deterministic tokens: every lossless rule accepts token x with probability p(x). A drafter for `replay` can do
  better, because it may select tokens with the target's noise.

No theorem decides whether to sample at all. The likeliest token of q is accepted with its probability under p, and a
sampled token with probability sum min(p, q). Either may be larger. `Best.estimate_accepted` computes both for a
draft, and `specdec_fast.tune.rule_selection` collects them over a sample of drafts before the engine is built. The
rule of the theorems stays, unless the likeliest tokens gain more than the noise of the sample. Without that, the choice
and with it the text of a seed would depend on chance: on the prompts that were sampled.

The choice is made once, not per step. A choice that depends on sampled tokens would change the distribution. A choice
that depends on other requests would make texts depend on the batch. The sample decides only which rule runs: it may
change the text of a seed, but never its distribution. Tests: tests/rules/test_best.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from specdec_fast.adaptive.exact_acceptance import expected_accepted, likeliest_accepted
from specdec_fast.core.distributions import TokenDistributions
from specdec_fast.core.draft import Draft
from specdec_fast.interfaces import Acceptance, Needs, Rng, Rule, ThresholdRule
from specdec_fast.rules import get_rule, traversal
from specdec_kernels import TreePlan

LIKELIEST = "likeliest tokens"
"""Key of `Best.estimate_accepted` for drafts of the likeliest tokens of q. All rules accept them equally often."""


class Choice(NamedTuple):
    """A chosen rule.

    Attributes:
        rule: The rule.
        why: The reason, in one sentence.
        prefers: How the drafter should pick its tokens (`Rule.prefers`).
    """

    rule: Rule
    why: str
    prefers: str


@dataclass(frozen=True, slots=True)
class Best(ThresholdRule):
    """Chooses a lossless rule by the drafter's capabilities and by a sample of its drafts.

    The choice never depends on the tokens that are verified next, because that would change the distribution. An engine
    runs the chosen rule. If `Best` is called directly, it is rule `traversal`, which verifies every draft.
    """

    name: str = "best"
    lossless: bool = True
    replays: bool = False
    uses_q: bool = True
    prefers: str = "sampled"
    from_leaves: bool = True

    def choose_rule(
        self, needs: Needs, temperature: float | None = None, estimates: Mapping[str, Tensor] | None = None
    ) -> Choice:
        """Chooses the rule for a drafter.

        Args:
            needs: Needs of the drafter.
            temperature: The temperature of all requests. None if they differ or are unknown.
            estimates: Results of `estimate_accepted` for a sample of N drafts, float64 [N] by rule. None or empty
                without a sample.

        Returns:
            The rule, the reason, and how the drafter should pick its tokens.
        """
        name, why = self._rule_by_theorem(needs, temperature)
        rule = get_rule(name)
        if not estimates or not needs.dists or temperature == 0:
            return Choice(rule, why, rule.prefers)
        means = {method: float(values.mean()) for method, values in estimates.items()}
        ranked = sorted(means.items(), key=lambda each: -each[1])
        found = ", ".join(f"{value:.3f} {_describe(method)}" for method, value in ranked)
        gain, noise = paired_gain(estimates[LIKELIEST], estimates[name])
        numbers = f"expected accepted tokens per draft of a sample: {found}"
        measured = f"{numbers}; the {LIKELIEST} gain {gain:+.3f} +- {noise:.3f} (95 % interval)"
        if gain > noise:
            why = (
                "the likeliest tokens are accepted more often than sampled ones, by all rules alike; the text of replay"
            )
            return Choice(get_rule("replay"), f"{why} depends on the seed alone; {measured}", "greedy")
        if gain > 0:
            measured += f", which is within the noise, so {name} stays"
        return Choice(rule, f"{why}; {measured}", rule.prefers)

    def estimate_accepted(self, needs: Needs, draft: Draft, target_dists: TokenDistributions) -> dict[str, Tensor]:
        """Computes the expected accepted tokens of a sampled draft under each rule.

        Relations between rules hold for means over drafts, not for each draft.

        Args:
            needs: Needs of the drafter.
            draft: Packed trees of M sampled nodes.
            target_dists: The target's distribution after each node, M rows.

        Returns:
            Expected accepted tokens, float64 [B], by rule. Chains have an entry "replay" for tokens coupled by its
            noise; coupled siblings have no closed form. `LIKELIEST` is the entry for drafts of the likeliest tokens.
        """
        names = ("block", "rejection", "replay") if needs.topology == "chain" else ("traversal", "recursive_rejection")
        found = {name: expected_accepted(get_rule(name), draft, target_dists) for name in names}
        return found | {LIKELIEST: likeliest_accepted(draft, target_dists)}

    @staticmethod
    def _rule_by_theorem(needs: Needs, temperature: float | None) -> tuple[str, str]:
        """Returns the name of the rule that accepts the most tokens by theorem, and the reason."""
        if temperature == 0:
            return "greedy", "at temperature 0 every rule keeps exactly the target's arg-max; greedy reads nothing else"
        if not needs.dists:
            return (
                "replay",
                "the drafter proposes deterministic tokens; for replay it may pick them with the noise that the target "
                "will use, and the text depends on the seed alone",
            )
        if needs.topology == "chain":
            return (
                "block",
                "the drafter samples chains; block verification accepts the most tokens of a sampled chain of all "
                "lossless rules, at least as many as rule rejection",
            )
        return (
            "traversal",
            "the drafter samples trees; traversal verification accepts at least as many tokens as rule "
            "recursive_rejection, and takes every proposal distribution",
        )

    def __call__(
        self, draft: Draft, plan: TreePlan, target_dists: TokenDistributions, rng: Rng, uniforms: Tensor | None = None
    ) -> Acceptance:
        """Verifies a draft by rule `traversal`."""
        return traversal.RULE(draft, plan, target_dists, rng, uniforms)

    def thresholds(self, draft: Draft, plan: TreePlan, target_dists: TokenDistributions) -> tuple[Tensor, Tensor]:
        """Returns the thresholds and residuals of rule `traversal`."""
        return traversal.RULE.thresholds(draft, plan, target_dists)


def paired_gain(ours: Tensor, theirs: Tensor) -> tuple[float, float]:
    """Computes the mean gain of one way over another on the same drafts, and its noise.

    Args:
        ours: Expected accepted tokens of each draft, [N].
        theirs: The same of the other way, [N].

    Returns:
        The mean difference, and half the width of its 95 % interval by Student's t distribution. Drafts count as
        independent. The noise is infinite for fewer than three drafts.
    """
    gains, degrees = ours.double() - theirs.double(), len(ours) - 1
    if degrees < 2:
        return float(gains.mean()), math.inf
    # quantile of t by the expansion around the normal quantile 1.96 (Abramowitz and Stegun 1964, 26.7.5)
    quantile = 1.96 + 2.37 / degrees + 2.82 / degrees**2
    return float(gains.mean()), quantile * float(gains.std()) / math.sqrt(len(gains))


def _describe(method: str) -> str:
    """Describes a key of `Best.estimate_accepted` in words."""
    return {"replay": "coupled, by replay", LIKELIEST: f"of the {LIKELIEST}"}.get(method, f"sampled, by {method}")


RULE = Best()
