"""Exact distributions that rules emit, by enumeration, compared with the target's in rational arithmetic.

The distributions are joint over several tokens and steps. `step_enumeration` computes those of one step. The cases
cover every proposal distribution, tree shape and drafter policy.

For replay, the cases include drafts that are coupled by its noise, on chains. The joint distribution of draft token and
target's choice is rational there (`rational_oracle.coupled_choice`). On trees, `step_enumeration.choice_cells` checks
that the emitted tokens are the target's choices for every combination of choices. Coupled trees follow from that.
Tests: tests/lab/test_exact_distributions.py.
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
    """Result of one enumeration.

    Attributes:
        rule: Name of the rule.
        proposal: Proposal distribution.
        shape: Tree shapes, in digits.
        policy: Drafter policy.
        vocab: Number of tokens.
        length: Length of the texts.
        error: Largest difference between a text's probability and the target's.
        accepted: Expected accepted tokens of the first step.
        drafts: Number of drafts of the first step.
        backend: Backend of the operators.
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
        """Whether the error is below the tolerance."""
        return self.error < TOLERANCE

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields for JSON."""
        return asdict(self) | {"holds": self.holds}


@dataclass(frozen=True, slots=True)
class Case:
    """Settings of one enumeration.

    Attributes:
        rule: Name of the rule.
        proposal: Proposal distribution, a key of `PROPOSALS` or `COUPLED`.
        shapes: Tree shapes.
        policy: Drafter policy, a key of `POLICIES`.
        vocab: Number of tokens.
        length: Length of the texts.
        seed: Seed of the models.
    """

    rule: str
    proposal: str
    shapes: tuple[Shape, ...]
    policy: str
    vocab: int = 3
    length: int = 3
    seed: int = 0


def enumerate_case(case: Case, backend: str = "reference", rule: Rule | None = None) -> Exact:
    """Compares the emitted distribution of a case with the target's.

    Args:
        case: The case.
        backend: Backend of the operators.
        rule: A rule that replaces the named one, for tests of wrong rules.

    Returns:
        The largest error and the expected acceptance.
    """
    found = rule or get_rule(case.rule)
    target = RationalModel(case.vocab, case.seed)
    q = RationalModel(case.vocab, case.seed + 50, like=target)
    other = RationalModel(case.vocab, case.seed + 90, like=target)
    policy: Policy = POLICIES[case.policy]
    known: dict[object, tuple[Outcomes, float]] = {}

    def key_of(context: Text) -> object:
        # policies `ragged` and `adaptive` also depend on the sum of the tokens
        period = {"ragged": 3, "adaptive": len(case.shapes)}.get(case.policy, 1)
        return target.key(context), sum(context) % period

    def drafts_after(context: Text) -> list[DraftTree]:
        noise = target if case.proposal == COUPLED else None
        return all_drafts(context, q, other, case.proposal, case.shapes, policy, noise)

    def enumerate_steps(contexts: Iterable[Text]) -> None:
        """Enumerates the steps after one context of each key, in one batch."""
        new = {key_of(context): context for context in contexts}
        outcomes = step_outcomes(found, {each: drafts_after(each) for each in new.values()}, target.after)
        known.update((key, outcomes[context]) for key, context in new.items())

    def step(context: Text) -> Iterator[tuple[float, Text]]:
        if key_of(context) not in known:  # a wrong rule may emit tokens that the target never emits
            enumerate_steps([context])
        yield from ((share, text) for text, share in known[key_of(context)][0].items())

    with use_backend(backend):
        enumerate_steps(context for length in range(case.length) for context in target_dist(target.after, length))
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
    """Returns whether a rule verifies trees of sampled tokens (`Rule.why_not`)."""
    return rule.why_not(Needs(topology="tree", dists=True)) is None


def own_rules() -> list[str]:
    """Returns the names of the lossless rules that do not delegate to another rule, as `best` does."""
    return [name for name in rule_names() if get_rule(name).lossless and not hasattr(get_rule(name), "choose_rule")]


def has_a_dist(rule: Rule) -> bool:
    """Returns whether a rule is lossless and serves temperature 1, which greedy refuses."""
    return rule.lossless and rule.why_not_sampling(SamplingParams(temperature=1.0)) is None


def cases_for(name: str, *, small: bool = False) -> Iterator[Case]:
    """Lists the cases of a rule.

    Args:
        name: Name of the rule.
        small: Use only one shape for each proposal distribution and policy.

    Yields:
        Cases of every proposal distribution, shape and policy for which the rule must keep the distribution.
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
    """Runs all cases of the lossless rules of `names` that sample, and calls `tick` after each."""
    found = []
    for name in names:
        if has_a_dist(get_rule(name)):
            for case in cases_for(name, small=small):
                found.append(enumerate_case(case, backend))
                tick()
    return found
