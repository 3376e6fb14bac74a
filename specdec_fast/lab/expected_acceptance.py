"""Expected accepted tokens of a step by enumeration, compared with closed forms and with upper bounds.

Tests: tests/lab/test_expected_acceptance.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

from specdec_fast.lab.draft_enumeration import CHAINS, COUPLED, POLICIES, Shape, all_drafts
from specdec_fast.lab.exact_distributions import TOLERANCE, has_a_dist, takes_trees
from specdec_fast.lab.rational_oracle import (
    RationalModel,
    block_accepted,
    coupled_accepted,
    geometric_tokens,
    overlap,
    rejection_accepted,
    transport_bound,
)
from specdec_fast.lab.step_enumeration import step_outcomes
from specdec_fast.rules import get_rule
from specdec_kernels import use_backend

FULL = POLICIES["full"]
SUMS: dict[str, tuple[str, str, Callable[..., Fraction]]] = {
    "rejection": ("sum of E[prod min(1, p/q)]", "sampled", rejection_accepted),
    "block": ("sum of E[w_i]", "sampled", block_accepted),
    "replay": ("sum of prod 1 / sum max(p_y/p_x, q_y/q_x)", COUPLED, coupled_accepted),
}
"""For each rule on chains: the formula, the proposals that it holds for, and the function that computes it."""
NODES: tuple[Shape, ...] = ((-1, 0), (-1, 0, 0), (-1, 0, 0, 0))
"""One node with one to three siblings."""


@dataclass(frozen=True, slots=True)
class Expected:
    """One comparison of expected accepted tokens.

    Attributes:
        rule: Name of the rule, or of the relation between two rules.
        setting: Draft and models, in words.
        accepted: Expected accepted tokens, by enumeration.
        value: The reference value.
        relation: "=" or "<=", which must hold between `accepted` and `value`.
        source: Formula or rule that gives the value.
    """

    rule: str
    setting: str
    accepted: float
    value: float
    relation: str
    source: str

    @property
    def holds(self) -> bool:
        """Whether the relation holds within the tolerance."""
        if self.relation == "=":
            return abs(self.accepted - self.value) < TOLERANCE
        return self.accepted <= self.value + TOLERANCE

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields for JSON."""
        return asdict(self) | {"holds": self.holds}


def _accepted(name: str, proposal: str, shape: Shape, target: RationalModel, q: RationalModel) -> float:
    """Expected accepted tokens of a step after the empty text."""
    with use_backend("reference"):
        trees = all_drafts((), q, q, proposal, (shape,), FULL, target if proposal == COUPLED else None)
        return step_outcomes(get_rule(name), {(): trees}, target.after)[()][1]


def on_chains(name: str, seed: int) -> list[Expected]:
    """Compares a rule on chains with its closed form.

    On models without memory, rule `rejection` is also compared with the geometric series. Rule `replay` must not exceed
    `rejection`, and `rejection` must not exceed `block`.

    Args:
        name: Name of the rule.
        seed: Seed of the models.

    Returns:
        Comparisons for chains of each length.
    """
    rows = []
    for depth, shape in enumerate(CHAINS, 1):
        target = RationalModel(3, seed)
        q = RationalModel(3, seed + 50, like=target)
        if name in SUMS:
            words, proposal, accepted = SUMS[name]
            value = float(accepted(target.after, q.after, (), depth))
            got = _accepted(name, proposal, shape, target, q)
            rows.append(Expected(name, f"chain of {depth}, models with memory", got, value, "=", words))
        same, other = (RationalModel(3, seed + shift, memory=0, timeless=True) for shift in (1, 2))
        if name == "rejection":
            alpha = float(overlap(same.after(()), other.after(())))
            got = _accepted(name, "sampled", shape, same, other) + 1
            value = float(geometric_tokens(alpha, depth))
            rows.append(
                Expected(name, f"tokens per step, chain of {depth}, no memory", got, value, "=",
                         "(1 - a^(g+1)) / (1 - a)")
            )  # fmt: skip
        if name == "replay":
            got = _accepted(name, COUPLED, shape, target, q)
            most = float(rejection_accepted(target.after, q.after, (), depth))
            rows.append(
                Expected("replay <= rejection", f"chain of {depth}, models with memory", got, most, "<=", "rejection")
            )
        if name == "block":
            got = _accepted(name, "sampled", shape, target, q)
            least = float(rejection_accepted(target.after, q.after, (), depth))
            rows.append(
                Expected("rejection <= block", f"chain of {depth}, models with memory", least, got, "<=", "block")
            )
    return rows


def at_a_node(name: str, proposal: str, seed: int) -> list[Expected]:
    """Compares a rule at one node with the optimal transport bound of the same proposals (Hu et al. 2025).

    Rules that test uniforms reach the bound for one sampled token and for hybrid nodes.

    Args:
        name: Name of the rule.
        proposal: Proposal distribution.
        seed: Seed of the models.

    Returns:
        Comparisons for one to three siblings.
    """
    rows = []
    target = RationalModel(4, seed)
    q = RationalModel(4, seed + 50, like=target)
    for count, shape in enumerate(NODES, 1):
        sets: dict[frozenset[int], Fraction] = {}
        for tree in all_drafts((), q, q, proposal, (shape,), FULL):
            key = frozenset(tree.tokens[1:])
            sets[key] = sets.get(key, Fraction(0)) + tree.chance
        got = _accepted(name, proposal, shape, target, q)
        best = float(transport_bound(target.after(()), sets))
        reaches = not get_rule(name).replays and (count == 1 or proposal == "hybrid")
        rows.append(Expected(name, f"node, {count} {proposal}", got, best, "=" if reaches else "<=", "alpha*"))
    return rows


def run_expected(names: Sequence[str], seeds: Sequence[int] = (3, 17)) -> list[Expected]:
    """Runs all comparisons for the lossless rules of `names` that sample."""
    found: list[Expected] = []
    for name in names:
        rule = get_rule(name)
        if not has_a_dist(rule):
            continue
        for seed in seeds:
            found += on_chains(name, seed)
            for proposal in ("sampled", "without", "hybrid") if takes_trees(rule) else ():
                found += at_a_node(name, proposal, seed)
    return found
