"""Expected accepted tokens of a step, by enumeration of the rule, next to closed forms and to the best possible.

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
    block_rule_accepted,
    coupled_rule_accepted,
    geometric_tokens,
    overlap,
    token_rule_accepted,
    transport_bound,
)
from specdec_fast.lab.step_enumeration import step_outcomes
from specdec_fast.rules import get_rule
from specdec_kernels import use_backend

FULL = POLICIES["full"]
SUMS: dict[str, tuple[str, str, Callable[..., Fraction]]] = {
    "rejection": ("sum of E[prod min(1, p/q)]", "sampled", token_rule_accepted),
    "block": ("sum of E[w_i]", "sampled", block_rule_accepted),
    "replay": ("sum of prod 1 / sum max(p_y/p_x, q_y/q_x)", COUPLED, coupled_rule_accepted),
}
"""For a rule on chains: what is summed, for which proposals, and the sum."""
NODES: tuple[Shape, ...] = ((-1, 0), (-1, 0, 0), (-1, 0, 0, 0))


@dataclass(frozen=True, slots=True)
class Expected:
    """accepted: by enumeration; value: what `source` says; relation: "=" or "<=" between them."""

    rule: str
    setting: str
    accepted: float
    value: float
    relation: str
    source: str

    @property
    def holds(self) -> bool:
        if self.relation == "=":
            return abs(self.accepted - self.value) < TOLERANCE
        return self.accepted <= self.value + TOLERANCE

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"holds": self.holds}


def _accepted(name: str, proposal: str, shape: Shape, target: RationalModel, q: RationalModel) -> float:
    with use_backend("reference"):
        trees = all_drafts((), q, q, proposal, (shape,), FULL, target if proposal == COUPLED else None)
        return step_outcomes(get_rule(name), {(): trees}, target.after)[()][1]


def on_chains(name: str, seed: int) -> list[Expected]:
    """token and block on drawn chains, replay on coupled ones, against their sums; on models without memory against the
    geometric series.
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
            most = float(token_rule_accepted(target.after, q.after, (), depth))
            rows.append(
                Expected("replay <= rejection", f"chain of {depth}, models with memory", got, most, "<=", "rejection")
            )
        if name == "block":
            got = _accepted(name, "sampled", shape, target, q)
            least = float(token_rule_accepted(target.after, q.after, (), depth))
            rows.append(Expected("token <= block", f"chain of {depth}, models with memory", least, got, "<=", "block"))
    return rows


def at_a_node(name: str, proposal: str, seed: int) -> list[Expected]:
    """One node with one to three siblings, against the optimal transport of the same proposals.

    The ordered rules reach it for one drawn token and for the hybrid node (Hu et al. 2025).
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
    """All comparisons for the rules that have a distribution."""
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
