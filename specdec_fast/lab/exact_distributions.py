"""The distribution that a rule emits, by enumeration of all its coins, next to the target's distribution in rational
arithmetic.

Emitted distributions are joint over several tokens and steps; what one step emits is found in `lab.cells`. Every
proposal distribution, tree shape and drafter policy is a case. For replay, drafts coupled by its own noise are a
proposal distribution too, on chains: the joint distribution of the drafted token and the target's choice under shared
Gumbel noise is rational (`oracle.coupled_choice`). On trees the order of several drafted tokens enters it, and nodes
of a level share noise; there coupled drafts are covered because in every cell, whatever its chance, the emitted
tokens are the target's choices (`cells.choice_cells`). Tests: tests/lab/test_exact_distributions.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from specdec_fast.interfaces import Needs, Rule
from specdec_fast.lab.draft_enumeration import (
    CHAINS,
    COUPLED,
    DEEPEST,
    ON_CHAINS,
    POLICIES,
    PROPOSALS,
    TREES,
    DraftTree,
    Policy,
    Shape,
    all_drafts,
)
from specdec_fast.lab.rational_oracle import RationalModel, Text, target_dist, text_dist
from specdec_fast.lab.step_enumeration import Outcomes, step_outcomes
from specdec_fast.rules import get_rule, rule_names
from specdec_fast.sampling.params import SamplingParams
from specdec_kernels import use_backend

TOLERANCE = 1e-12


@dataclass(frozen=True, slots=True)
class Exact:
    """One enumeration. error: largest difference of any text's probability from the target's; accepted: expected
    accepted tokens of the first step; drafts: how many the first step has.
    """

    rule: str
    proposal: str
    shape: str
    policy: str
    vocab: int
    length: int
    error: float
    accepted: float
    drafts: int
    backend: str

    @property
    def holds(self) -> bool:
        return self.error < TOLERANCE

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"holds": self.holds}


@dataclass(frozen=True, slots=True)
class Case:
    """What one enumeration is about; `seed` makes the models."""

    rule: str
    proposal: str
    shapes: tuple[Shape, ...]
    policy: str
    vocab: int = 3
    length: int = 3
    seed: int = 0


def enumerate_case(case: Case, backend: str = "reference", rule: Rule | None = None) -> Exact:
    """The emitted distribution of a case against the target's. rule: instead of the named one (for wrong rules)."""
    found = rule or get_rule(case.rule)
    target = RationalModel(case.vocab, case.seed)
    q = RationalModel(case.vocab, case.seed + 50, like=target)
    other = RationalModel(case.vocab, case.seed + 90, like=target)
    policy: Policy = POLICIES[case.policy]
    known: dict[object, tuple[Outcomes, float]] = {}

    def key_of(context: Text) -> object:
        # `ragged` and `adaptive` also look at the sum of the tokens
        period = {"ragged": 3, "adaptive": len(case.shapes)}.get(case.policy, 1)
        return target.key(context), sum(context) % period

    def drafts_after(context: Text) -> list[DraftTree]:
        noise = target if case.proposal == COUPLED else None
        return all_drafts(context, q, other, case.proposal, case.shapes, policy, noise)

    def learn(contexts: Iterable[Text]) -> None:
        """Find what steps after these contexts emit, all in one batch, one context of each key."""
        new = {key_of(context): context for context in contexts}
        found_now = step_outcomes(found, {each: drafts_after(each) for each in new.values()}, target.after)
        known.update((key, found_now[context]) for key, context in new.items())

    def step(context: Text) -> Iterator[tuple[float, Text]]:
        if key_of(context) not in known:  # of a rule that emits what the target never does
            learn([context])
        yield from ((share, text) for text, share in known[key_of(context)][0].items())

    with use_backend(backend):
        learn(context for length in range(case.length) for context in target_dist(target.after, length))
        emitted = text_dist(step, case.length)
    exact = target_dist(target.after, case.length)
    error = max(abs(emitted.get(text, 0.0) - float(exact.get(text, 0))) for text in emitted.keys() | exact.keys())
    drafts = len(drafts_after(()))
    accepted = known[key_of(())][1]
    shape = " ".join("".join(map(str, one[1:])) for one in case.shapes)
    return Exact(
        found.name, case.proposal, shape, case.policy, case.vocab, case.length, error, accepted, drafts, backend
    )


def takes_trees(rule: Rule) -> bool:
    """Whether a rule verifies trees of drawn tokens, by its own word."""
    return rule.why_not(Needs(topology="tree", dists=True)) is None


def own_rules() -> list[str]:
    """Names of the lossless rules that verify on their own; one that picks another (`pick`) is tested as that one."""
    return [name for name in rule_names() if get_rule(name).lossless and not hasattr(get_rule(name), "choose_rule")]


def has_a_dist(rule: Rule) -> bool:
    """Whether a rule is lossless at temperature 1 (greedy refuses it, and its distribution is a point)."""
    return rule.lossless and rule.why_not_sampling(SamplingParams(temperature=1.0)) is None


def cases_for(name: str, *, small: bool = False) -> Iterator[Case]:
    """Every proposal distribution, shape and policy that a rule must hold for. small: one shape for each
    distribution and policy.
    """
    rule = get_rule(name)
    policies = [each.name for each in POLICIES.values() if not (each.anticipating and rule.uses_q)]
    for proposal in (*ON_CHAINS, COUPLED) if rule.replays else ON_CHAINS:
        for policy in policies:
            one_each = [(shape,) for shape in (CHAINS[2:] if small else CHAINS)]
            for at, shapes in enumerate([CHAINS] if policy == "adaptive" else one_each):
                yield Case(name, proposal, shapes, policy, seed=at)
        yield Case(name, proposal, (CHAINS[2],), "full", vocab=4, length=4, seed=7)
    if not takes_trees(rule):
        return
    for at, proposal in enumerate(PROPOSALS):
        for turn, policy in enumerate(policies):
            one_each = [(shape,) for shape in ((TREES[(at + turn) % len(TREES)],) if small else TREES)]
            for shapes in [TREES] if policy == "adaptive" else one_each:
                yield Case(name, proposal, shapes, policy, seed=at + turn)
        yield Case(name, proposal, (TREES[at],), "full", length=4, seed=at + 17)
        yield Case(name, proposal, (TREES[0],), "full", vocab=4, seed=at + 11)
        yield Case(name, proposal, (DEEPEST,), "full", vocab=4, seed=at + 13)


def run_exact(
    names: Sequence[str], *, small: bool = False, backend: str = "reference", tick: Callable[[], None] = lambda: None
) -> list[Exact]:
    """All cases of all rules that have a distribution to keep."""
    found = []
    for name in names:
        if has_a_dist(get_rule(name)):
            for case in cases_for(name, small=small):
                found.append(enumerate_case(case, backend))
                tick()
    return found
