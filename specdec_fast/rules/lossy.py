"""Three rules that do NOT keep the target's distribution, for comparison only. They are used only if named explicitly.

- `lossy`, or `lossy:epsilon=0.09,delta=0.3`: typical acceptance (Cai et al. 2024, Medusa, section 2.3.2). A token is
  kept if its probability exceeds min(epsilon, delta * exp(-entropy)). The longest such path is accepted.
- `lossy:lenience=0.5`: lenience (Leviathan et al. 2023, appendix A.5). Rule `rejection` with q multiplied by l < 1, so
  no token is emitted more often than p / l. Deterministic tokens have no q and are tested as by `rejection`.
- `lossy:among=3`: the approximate acceptance of blockwise decoding (Stern et al. 2018, section 5). A token is kept if
  it is one of the 3 likeliest, at any temperature. `lossy:among=3,least=2` also keeps the first 2 tokens of a path.

The first two are greedy at temperature 0. Tests: tests/rules/test_lossy.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from specdec_fast.core.distributions import TokenDistributions
from specdec_fast.core.draft import Draft
from specdec_fast.interfaces import Acceptance, Needs, Rng, ThresholdRule
from specdec_fast.rules.rejection import chain_thresholds, verify_chains
from specdec_kernels import TreePlan, distribution_stats, draft_sample, typical_verify

_NEXT_TOKEN_DRAW = 2**30  # index of the draw of the next token; no drafter uses an index this large


def _thresholds_of_path(path: Tensor, target_dists: TokenDistributions) -> tuple[Tensor, Tensor]:
    """Returns thresholds [M], 1 on the path and 0 elsewhere, and the target's weights [M, V]."""
    weights = target_dists.probs()
    accept = weights.new_zeros(len(weights))
    accept[path[path >= 0].long()] = 1.0
    return accept, weights


@dataclass(frozen=True, slots=True)
class Typical(ThresholdRule):
    """Typical acceptance. Lossy. Takes any tree; draft distributions are not used.

    Args:
        epsilon: Upper bound of the threshold, 0 to 1.
        delta: Factor of exp(-entropy), 0 to 1.
        name: Name of the rule; "" derives it from the options.

    Raises:
        ValueError: If an option is out of range.

    Source:
        Cai et al. 2024 (Medusa), section 2.3.2.
    """

    epsilon: float = 0.09
    delta: float = 0.3
    name: str = ""
    lossless: bool = field(default=False, init=False)
    replays: bool = field(default=False, init=False)
    uses_q: bool = field(default=False, init=False)
    prefers: str = field(default="greedy", init=False)
    from_leaves: bool = field(default=False, init=False)
    greedy_at_zero: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        for name, value in (("epsilon", self.epsilon), ("delta", self.delta)):
            if not 0 <= value <= 1:
                raise ValueError(f"rule lossy {name}: got {value}; expected a number from 0 to 1")
        usual = (self.epsilon, self.delta) == (0.09, 0.3)
        options = "" if usual else f":epsilon={self.epsilon:g},delta={self.delta:g}"
        object.__setattr__(self, "name", self.name or f"lossy{options}")

    def __call__(
        self, draft: Draft, plan: TreePlan, target_dists: TokenDistributions, rng: Rng, uniforms: Tensor | None = None
    ) -> Acceptance:
        """Accepts the longest typical path and samples the next token."""
        return self._verify(draft, plan, target_dists, rng.seeds, rng.positions)

    def thresholds(self, draft: Draft, plan: TreePlan, target_dists: TokenDistributions) -> tuple[Tensor, Tensor]:
        """Returns thresholds [M], 1 on the longest typical path and 0 elsewhere, and the target's weights [M, V]."""
        rows = draft.offsets[1:]
        return _thresholds_of_path(self._verify(draft, plan, target_dists, rows.long(), rows).path, target_dists)

    def _verify(
        self, draft: Draft, plan: TreePlan, dists: TokenDistributions, seeds: Tensor, positions: Tensor
    ) -> Acceptance:
        """Runs the operator. Callers without the keys of a step may use only its path."""
        links = (draft.tokens, draft.offsets, plan.first_child, plan.next_sibling)
        limit = {"epsilon": self.epsilon, "delta": self.delta, "max_depth": draft.max_depth}
        target = (dists.logits, *dists.stats)
        found = typical_verify(*links, target, draft.score_only, seeds, positions, overlay=dists.overlay, **limit)
        return Acceptance(*found)


@dataclass(frozen=True, slots=True)
class Lenience(ThresholdRule):
    """Rejection with lenience. Lossy. Takes chains.

    Args:
        lenience: Factor l of the draft distribution, above 0 and at most 1. 1 is rule `rejection`.
        name: Name of the rule; "" derives it from the options.

    Raises:
        ValueError: If `lenience` is out of range.

    Source:
        Leviathan et al. 2023, appendix A.5.
    """

    lenience: float = 0.5
    name: str = ""
    lossless: bool = field(default=False, init=False)
    replays: bool = field(default=False, init=False)
    uses_q: bool = field(default=True, init=False)
    prefers: str = field(default="sampled", init=False)
    from_leaves: bool = field(default=False, init=False)
    greedy_at_zero: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        if not 0 < self.lenience <= 1:
            raise ValueError(
                f"rule lossy lenience: got {self.lenience}; expected a number above 0, up to 1 (rule rejection)"
            )
        object.__setattr__(self, "name", self.name or f"lossy:lenience={self.lenience:g}")

    def why_not(self, needs: Needs) -> str | None:
        """Refuses drafters of trees."""
        if needs.topology != "chain":
            return "rule lossy:lenience: got a drafter that proposes trees; expected chains, or lossy (typical)"
        return None

    def __call__(
        self, draft: Draft, plan: TreePlan, target_dists: TokenDistributions, rng: Rng, uniforms: Tensor | None = None
    ) -> Acceptance:
        """Verifies chains by rule `rejection` with scaled draft distributions."""
        return verify_chains("rejection", self._scale_dists(draft), target_dists, rng, uniforms)

    def thresholds(self, draft: Draft, plan: TreePlan, target_dists: TokenDistributions) -> tuple[Tensor, Tensor]:
        """Returns thresholds min(1, p(x) / (l q(x))) [M], and residuals, the positive part of p - l q [M, V]."""
        return chain_thresholds("rejection", self._scale_dists(draft), target_dists)

    def _scale_dists(self, draft: Draft) -> Draft:
        """Replaces q by l q, by means of a larger log-normaliser."""
        if not draft.is_chain:
            raise ValueError("rule lossy:lenience: got a tree; expected chains, or lossy (typical)")
        draft.check_no_dropped_samples(self.name)
        q = draft.dists
        if q is None:
            return draft
        scaled = TokenDistributions(q.logits, q.inv_t, q.lse - math.log(self.lenience), q.cut, q.tie_id, q.token_ids)
        return replace(draft, dists=scaled)


@dataclass(frozen=True, slots=True)
class TopTokens(ThresholdRule):
    """Keeps tokens among the target's likeliest. Lossy. Takes any tree and accepts the longest such path.

    Draft distributions are not used. Temperature and filters affect only the next token. Tokens with a logit of -inf
    are never kept.

    Args:
        among: A token is kept if it is among this many likeliest tokens of the target. Ties go to the lower id.
        least: Number of first tokens of a path that are always kept.
        name: Name of the rule; "" derives it from the options.

    Raises:
        ValueError: If an option is out of range.

    Source:
        Stern et al. 2018, section 5.
    """

    among: int = 2
    least: int = 0
    name: str = ""
    lossless: bool = field(default=False, init=False)
    replays: bool = field(default=False, init=False)
    uses_q: bool = field(default=False, init=False)
    prefers: str = field(default="greedy", init=False)
    from_leaves: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        for name, value, lowest in (("among", self.among, 1), ("least", self.least, 0)):
            if not lowest <= value < 2**31 or value != int(value):
                raise ValueError(f"rule lossy {name}: got {value:g}; expected a whole number, {lowest} or more")
            object.__setattr__(self, name, int(value))
        also = f",least={self.least}" if self.least else ""
        object.__setattr__(self, "name", self.name or f"lossy:among={self.among}{also}")

    def __call__(
        self, draft: Draft, plan: TreePlan, target_dists: TokenDistributions, rng: Rng, uniforms: Tensor | None = None
    ) -> Acceptance:
        """Accepts the longest path of kept tokens and samples the next token."""
        path, accepted = self._longest_path(draft, plan, target_dists)
        last = target_dists.select(path.gather(1, accepted[:, None].long()).squeeze(1).long().clamp(min=0))
        index = torch.full_like(accepted, _NEXT_TOKEN_DRAW)
        dist, positions = (last.logits, *last.stats), rng.positions + accepted
        following = draft_sample(*dist, rng.seeds, positions, index, overlay=last.overlay)
        return Acceptance(path, accepted, following)

    def thresholds(self, draft: Draft, plan: TreePlan, target_dists: TokenDistributions) -> tuple[Tensor, Tensor]:
        """Returns thresholds [M], 1 on the kept path and 0 elsewhere, and the target's weights [M, V]."""
        return _thresholds_of_path(self._longest_path(draft, plan, target_dists)[0], target_dists)

    def _longest_path(self, draft: Draft, plan: TreePlan, dists: TokenDistributions) -> tuple[Tensor, Tensor]:
        """Returns the longest path of kept tokens: typical acceptance at threshold 0, all other nodes score-only."""
        logits = dists.effective_logits().float()
        above = draft.offsets[:-1].long()[draft.row_of] + draft.parents.clamp(min=0)
        level = logits[above].gather(1, draft.tokens[:, None])
        ids = torch.arange(logits.shape[1], device=logits.device)
        before = (logits[above] > level) | ((logits[above] == level) & (ids < draft.tokens[:, None]))
        kept = (before.sum(1) < self.among) | (plan.depth <= self.least)
        score_only = ~(kept & (level[:, 0] > float("-inf"))) & (draft.parents >= 0)
        if draft.score_only is not None:
            score_only = score_only | draft.score_only
        one, none = torch.ones_like(logits[:, 0]), torch.zeros_like(logits[:, 0])
        unfiltered = (logits, *distribution_stats(logits, one, none.int(), one, none))
        links = (draft.tokens, draft.offsets, plan.first_child, plan.next_sibling)
        any_keys = draft.offsets[1:].long(), draft.offsets[1:]  # the sampled token is discarded
        path, accepted, _ = typical_verify(
            *links, unfiltered, score_only, *any_keys, max_depth=draft.max_depth, epsilon=0.0, delta=0.0
        )
        return path, accepted


def with_options(name: str, options: str) -> Typical | Lenience | TopTokens:
    """Builds the rule of a name with options.

    Args:
        name: The whole name, "lossy:lenience=0.5".
        options: The part after the colon: "lenience=0.5", "epsilon=0.1,delta=0.3" or "among=3,least=1".

    Returns:
        The rule.

    Raises:
        ValueError: If an option is unknown, is not a number, or is out of range.
    """
    given: dict[str, float] = {}
    for part in options.split(","):
        key, _, value = part.partition("=")
        try:
            given[key.strip()] = float(value)
        except ValueError:
            raise ValueError(f"rule {name}: got option {part!r}; expected a number, as in lossy:lenience=0.5") from None
    if set(given) == {"lenience"}:
        return Lenience(given["lenience"], name=name)
    if "among" in given and set(given) <= {"among", "least"}:
        return TopTokens(**given, name=name)  # type: ignore[arg-type]
    if not set(given) <= {"epsilon", "delta"}:
        raise ValueError(
            f"rule {name}: got options {sorted(given)}; expected lenience, epsilon and delta, or among and least"
        )
    return Typical(**given, name=name)


RULE = Typical()
