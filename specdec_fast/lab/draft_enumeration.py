"""Enumeration of all drafts that a drafter can propose in a context, with their exact probabilities.

Drafts differ by proposal distribution, tree shape and drafter policy.
Tests: tests/lab/test_draft_enumeration.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from specdec_fast.core.draft import ProposalKind
from specdec_fast.lab.rational_oracle import Distribution, RationalModel, Text, coupled_choice

Shape = tuple[int, ...]
"""Parents of the nodes. The root comes first with -1; children of a node are in index order."""

CHAINS: tuple[Shape, ...] = ((-1, 0), (-1, 0, 1), (-1, 0, 1, 2))
TREES: tuple[Shape, ...] = (
    (-1, 0, 0),
    (-1, 0, 0, 0),
    (-1, 0, 0, 1, 1),
    (-1, 0, 0, 1, 2),
    (-1, 0, 1, 1, 0),
    (-1, 0, 0, 1, 3),
    (-1, 0, 1, 2, 1),
)
DEEPEST = TREES[5]
"""Four nodes on three levels."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """A proposed token.

    Attributes:
        token: The token.
        proposal_kind: How the token was selected.
        dist: The distribution that it was sampled from. None for deterministic tokens.
    """

    token: int
    proposal_kind: ProposalKind
    dist: Distribution | None


Siblings = Iterator[tuple[Fraction, list[Proposal]]]
"""Proposals for the children of one node, with their probability."""


def deterministic(q: Distribution, other: Distribution, count: int, depth: int) -> Siblings:
    """Proposes the likeliest tokens of q, as point masses."""
    order = sorted(range(len(q)), key=lambda token: (-q[token], token))
    yield Fraction(1), [Proposal(token, ProposalKind.DETERMINISTIC, None) for token in order[:count]]


def repeated(q: Distribution, other: Distribution, count: int, depth: int) -> Siblings:
    """Proposes the likeliest token twice, then the next ones. Duplicates must not change the distribution."""
    order = sorted(range(len(q)), key=lambda token: (-q[token], token))
    yield (
        Fraction(1),
        [Proposal(order[max(0, at - 1) % len(q)], ProposalKind.DETERMINISTIC, None) for at in range(count)],
    )


def _with_a_sample(
    found: list[tuple[Fraction, list[Proposal]]], dist: Distribution
) -> list[tuple[Fraction, list[Proposal]]]:
    """Adds an independent sample to lists of proposals and their chances."""
    return [
        (chance * weight, [*picks, Proposal(token, ProposalKind.SAMPLED, dist)])
        for chance, picks in found
        for token, weight in enumerate(dist)
        if weight
    ]


def sampled(q: Distribution, other: Distribution, count: int, depth: int) -> Siblings:
    """Proposes independent samples of q."""
    found: list[tuple[Fraction, list[Proposal]]] = [(Fraction(1), [])]
    for _ in range(count):
        found = _with_a_sample(found, q)
    yield from found


def without_replacement(q: Distribution, other: Distribution, count: int, depth: int) -> Siblings:
    """Proposes samples of q without replacement; fewer if q has fewer tokens."""

    def go(chance: Fraction, picks: list[Proposal]) -> Siblings:
        taken = {pick.token for pick in picks}
        left = sum((weight for token, weight in enumerate(q) if token not in taken), Fraction(0))
        if len(picks) == count or not left:
            yield chance, picks
            return
        for token, weight in enumerate(q):
            if weight and token not in taken:
                yield from go(
                    chance * weight / left, [*picks, Proposal(token, ProposalKind.SAMPLED_WITHOUT_EARLIER, q)]
                )

    yield from go(Fraction(1), [])


def coupled(q: Distribution, other: Distribution, count: int, depth: int) -> Siblings:
    """Proposes the largest tokens of q under the target's Gumbel noise; distributed as `without_replacement`."""
    for chance, picks in without_replacement(q, other, count, depth):
        yield chance, [Proposal(pick.token, ProposalKind.DETERMINISTIC, None) for pick in picks]


def hybrid(q: Distribution, other: Distribution, count: int, depth: int) -> Siblings:
    """Proposes a sample of q without its likeliest `count - 1` tokens, then these (Hu et al. 2025, section 5)."""
    order = sorted(range(len(q)), key=lambda token: (-q[token], token))
    top = [Proposal(token, ProposalKind.DETERMINISTIC, None) for token in order[: count - 1]]
    taken = {pick.token for pick in top}
    left = sum((weight for token, weight in enumerate(q) if token not in taken), Fraction(0))
    if not left:
        yield Fraction(1), top
        return
    for token, weight in enumerate(q):
        if weight and token not in taken:
            yield weight / left, [Proposal(token, ProposalKind.SAMPLED_WITHOUT_DETERMINISTIC, q), *top]


def mixed(q: Distribution, other: Distribution, count: int, depth: int) -> Siblings:
    """Alternates between deterministic tokens, samples of q and samples of `other`; on chains by depth."""
    kinds = [(depth + at) % 3 for at in range(count)]
    found: list[tuple[Fraction, list[Proposal]]] = [(Fraction(1), [])]
    for kind in kinds:
        if kind == 0:
            top = max(range(len(q)), key=lambda token: (q[token], -token))
            found = [(chance, [*picks, Proposal(top, ProposalKind.DETERMINISTIC, None)]) for chance, picks in found]
            continue
        found = _with_a_sample(found, q if kind == 1 else other)
    yield from found


PROPOSALS: dict[str, Callable[[Distribution, Distribution, int, int], Siblings]] = {
    "deterministic": deterministic,
    "sampled": sampled,
    "mixed": mixed,
    "without": without_replacement,
    "hybrid": hybrid,
    "repeated": repeated,
}
ON_CHAINS = ("deterministic", "sampled", "mixed")
"""Proposals that differ on chains."""
COUPLED = "coupled"
"""Proposals that use the target's noise. Only for rules that replay this noise, and only on chains."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A drafter's policy for the shape of its drafts. All but `drop` decide before they sample a token.

    Attributes:
        name: Name of the policy.
        shape: Selects the tree for a context.
        expands: Returns whether a node gets children, from q at the node, q of its token, its depth and the context.
        drops: Returns whether a sampled token is removed before verification, from its probability under q.
    """

    name: str
    shape: Callable[[Sequence[Shape], Text], Shape] = lambda shapes, context: shapes[0]
    expands: Callable[[Distribution, Fraction, int, Text], bool] = lambda q, own, depth, context: True
    drops: Callable[[Fraction], bool] = lambda own: False

    @property
    def anticipating(self) -> bool:
        """Whether the policy removes tokens after it sampled them. Only rules that do not use q stay lossless."""
        return self.name == "drop"


POLICIES: dict[str, Policy] = {
    "full": Policy("full"),
    "stop before": Policy("stop before", expands=lambda q, own, depth, context: max(q) >= Fraction(1, 2)),
    "stop after": Policy("stop after", expands=lambda q, own, depth, context: own >= Fraction(1, 3)),
    "ragged": Policy("ragged", expands=lambda q, own, depth, context: depth < (len(context) + sum(context)) % 3),
    "adaptive": Policy(
        "adaptive", shape=lambda shapes, context: shapes[(2 * len(context) + sum(context)) % len(shapes)]
    ),
    "drop": Policy("drop", drops=lambda own: own < Fraction(2, 5)),
}


@dataclass(slots=True)
class DraftTree:
    """One possible draft. Node 0 is the root.

    Attributes:
        chance: Probability of the draft.
        tokens: Token of every node.
        parents: Parent of every node.
        proposal_kinds: How each token was selected.
        dist: Distribution that each token was sampled from. None for deterministic tokens.
        text: Tokens from below the root to each node.
        choice: Distribution of the target's choice after each node, given the tokens drafted there. None if they give
            no information about it.
    """

    chance: Fraction
    tokens: list[int] = field(default_factory=lambda: [0])
    parents: list[int] = field(default_factory=lambda: [-1])
    proposal_kinds: list[ProposalKind] = field(default_factory=lambda: [ProposalKind.DETERMINISTIC])
    dist: list[Distribution | None] = field(default_factory=lambda: [None])
    text: list[Text] = field(default_factory=lambda: [()])
    choice: list[Distribution | None] = field(default_factory=lambda: [None])

    def extended(
        self, parent: int, picks: list[Proposal], chance: Fraction, choice: Distribution | None = None
    ) -> DraftTree:
        """Returns a copy with children `picks` of node `parent`, and the target's choice there given these."""
        return DraftTree(
            self.chance * chance,
            [*self.tokens, *(pick.token for pick in picks)],
            [*self.parents, *(parent for _ in picks)],
            [*self.proposal_kinds, *(pick.proposal_kind for pick in picks)],
            [*self.dist, *(pick.dist for pick in picks)],
            [*self.text, *((*self.text[parent], pick.token) for pick in picks)],
            [*self.choice[:parent], choice, *self.choice[parent + 1 :], *(None for _ in picks)],
        )


def all_drafts(
    context: Text,
    q: RationalModel,
    other: RationalModel,
    proposal: str,
    shapes: Sequence[Shape],
    policy: Policy,
    target: RationalModel | None = None,
) -> list[DraftTree]:
    """Enumerates the drafts that can be proposed after a context.

    Nodes are in breadth-first order. The children of a node are adjacent, in the order in which they are tested.

    Args:
        context: The text before the draft.
        q: The draft model.
        other: A second draft model, for mixed proposals.
        proposal: A key of `PROPOSALS`, or `COUPLED`.
        shapes: Tree shapes that the policy selects from.
        policy: The drafter's policy.
        target: The target, for coupled proposals, which share its noise.

    Returns:
        All drafts; their probabilities add up to 1.
    """
    shape = policy.shape(shapes, context)
    children = [[node for node, parent in enumerate(shape) if parent == at] for at in range(len(shape))]
    make = coupled if proposal == COUPLED else PROPOSALS[proposal]
    # a partial draft: the tree, the place of each node in the shape, and the node to expand next
    pending: list[tuple[DraftTree, list[int], int]] = [(DraftTree(Fraction(1)), [0], 0)]
    done: list[DraftTree] = []
    while pending:
        tree, places, at = pending.pop()
        if at == len(tree.tokens):
            done.append(tree)
            continue
        path, below = (*context, *tree.text[at]), children[places[at]]
        dist = q.after(path)
        own = Fraction(1) if at == 0 else q.after(path[:-1])[tree.tokens[at]]
        depth = len(tree.text[at])
        if not below or not policy.expands(dist, own, depth, context):
            pending.append((tree, places, at + 1))
            continue
        for chance, picks in make(dist, other.after(path), len(below), depth):
            kept = [place for place, pick in enumerate(picks) if not policy.drops(dist[pick.token])]
            # a dropped token also gives information about the noise
            choice = coupled_choice(target.after(path), dist, picks[0].token) if target is not None else None
            longer = tree.extended(at, [picks[place] for place in kept], chance, choice)
            pending.append((longer, [*places, *(below[place] for place in kept)], at + 1))
    return done
