"""Every draft a drafter could make in a context, with its exact probability: proposal distributions, tree shapes,
policies.

Tests: tests/lab/test_draft_enumeration.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from specdec_fast.core.draft import ProposalKind
from specdec_fast.lab.rational_oracle import Distribution, RationalModel, Text, coupled_choice

Shape = tuple[int, ...]
"""Parents of the nodes, root first with -1; children of a node in index order."""

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
"""Four nodes, three levels."""


@dataclass(frozen=True, slots=True)
class Picked:
    """A proposed token: how it was drawn, and the distribution it came from (None: chosen)."""

    token: int
    proposal_kind: ProposalKind
    dist: Distribution | None


Siblings = Iterator[tuple[Fraction, list[Picked]]]


def chosen(q: Distribution, other: Distribution, count: int, depth: int) -> Siblings:
    """The likeliest tokens of q, as point masses."""
    order = sorted(range(len(q)), key=lambda token: (-q[token], token))
    yield Fraction(1), [Picked(token, ProposalKind.DETERMINISTIC, None) for token in order[:count]]


def repeated(q: Distribution, other: Distribution, count: int, depth: int) -> Siblings:
    """The same token several times, then others: duplicates gain nothing and must not harm."""
    order = sorted(range(len(q)), key=lambda token: (-q[token], token))
    yield Fraction(1), [Picked(order[max(0, at - 1) % len(q)], ProposalKind.DETERMINISTIC, None) for at in range(count)]


def drawn(q: Distribution, other: Distribution, count: int, depth: int) -> Siblings:
    """Independent draws from q."""
    found: list[tuple[Fraction, list[Picked]]] = [(Fraction(1), [])]
    for _ in range(count):
        found = [
            (chance * weight, [*picks, Picked(token, ProposalKind.SAMPLED, q)])
            for chance, picks in found
            for token, weight in enumerate(q)
            if weight
        ]
    yield from found


def without(q: Distribution, other: Distribution, count: int, depth: int) -> Siblings:
    """Draws from q without replacement; fewer when q has fewer tokens."""

    def go(chance: Fraction, picks: list[Picked]) -> Siblings:
        taken = {pick.token for pick in picks}
        left = sum((weight for token, weight in enumerate(q) if token not in taken), Fraction(0))
        if len(picks) == count or not left:
            yield chance, picks
            return
        for token, weight in enumerate(q):
            if weight and token not in taken:
                yield from go(chance * weight / left, [*picks, Picked(token, ProposalKind.SAMPLED_WITHOUT_EARLIER, q)])

    yield from go(Fraction(1), [])


def coupled(q: Distribution, other: Distribution, count: int, depth: int) -> Siblings:
    """The largest of q under Gumbel noise: the distribution of draws without replacement. By the target's own noise
    for rule replay, for which they are chosen tokens.
    """
    for chance, picks in without(q, other, count, depth):
        yield chance, [Picked(pick.token, ProposalKind.DETERMINISTIC, None) for pick in picks]


def hybrid(q: Distribution, other: Distribution, count: int, depth: int) -> Siblings:
    """One draw from q outside its likeliest `count - 1` tokens, then these, chosen (Hu et al. 2025, section 5)."""
    order = sorted(range(len(q)), key=lambda token: (-q[token], token))
    top = [Picked(token, ProposalKind.DETERMINISTIC, None) for token in order[: count - 1]]
    taken = {pick.token for pick in top}
    left = sum((weight for token, weight in enumerate(q) if token not in taken), Fraction(0))
    if not left:
        yield Fraction(1), top
        return
    for token, weight in enumerate(q):
        if weight and token not in taken:
            yield weight / left, [Picked(token, ProposalKind.SAMPLED_WITHOUT_DETERMINISTIC, q), *top]


def mixed(q: Distribution, other: Distribution, count: int, depth: int) -> Siblings:
    """Sources that take turns: chosen, drawn from q, drawn from another distribution; on a chain by depth."""
    kinds = [(depth + at) % 3 for at in range(count)]
    found: list[tuple[Fraction, list[Picked]]] = [(Fraction(1), [])]
    for kind in kinds:
        if kind == 0:
            top = max(range(len(q)), key=lambda token: (q[token], -token))
            found = [(chance, [*picks, Picked(top, ProposalKind.DETERMINISTIC, None)]) for chance, picks in found]
            continue
        dist = q if kind == 1 else other
        found = [
            (chance * weight, [*picks, Picked(token, ProposalKind.SAMPLED, dist)])
            for chance, picks in found
            for token, weight in enumerate(dist)
            if weight
        ]
    yield from found


PROPOSALS: dict[str, Callable[[Distribution, Distribution, int, int], Siblings]] = {
    "deterministic": chosen,
    "sampled": drawn,
    "mixed": mixed,
    "without": without,
    "hybrid": hybrid,
    "repeated": repeated,
}
ON_CHAINS = ("deterministic", "sampled", "mixed")
"""Proposal distributions that differ when every node has one child."""
COUPLED = "coupled"
"""Proposals by the noise that the target chooses by: of rules that replay it, and on chains only."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How a drafter decides what to draft. All but `drop` look only at what is known before a token is drawn.

    shape: the tree for a context; expands: whether a node's children are drafted, from the distribution q at that
    node, its own token's q and its depth; drops: whether a drawn token is thrown away before verification, from its q.
    """

    name: str
    shape: Callable[[Sequence[Shape], Text], Shape] = lambda shapes, context: shapes[0]
    expands: Callable[[Distribution, Fraction, int, Text], bool] = lambda q, own, depth, context: True
    drops: Callable[[Fraction], bool] = lambda own: False

    @property
    def anticipating(self) -> bool:
        """Decides about a token by looking at it: only rules that do not use q survive that."""
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
    """One possible draft: node 0 is the root. distribution[i] is None for chosen nodes; text[i]: the node's path;
    choice[i]: the distribution of the target's choice after it given what was drafted there, None where that says
    nothing about it.
    """

    chance: Fraction
    tokens: list[int] = field(default_factory=lambda: [0])
    parents: list[int] = field(default_factory=lambda: [-1])
    proposal_kinds: list[ProposalKind] = field(default_factory=lambda: [ProposalKind.DETERMINISTIC])
    dist: list[Distribution | None] = field(default_factory=lambda: [None])
    text: list[Text] = field(default_factory=lambda: [()])
    choice: list[Distribution | None] = field(default_factory=lambda: [None])

    def extended(
        self, parent: int, picks: list[Picked], chance: Fraction, choice: Distribution | None = None
    ) -> DraftTree:
        """A copy with the children `picks` under node `parent`, and the target's choice there given them."""
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
    """Every draft that can be made after `context`; the chances add up to 1. target: for coupled proposals, whose noise
    also chooses from its distribution.

    Nodes come in breadth-first order: all children of a node together, in the order in which they are tested.
    """
    shape = policy.shape(shapes, context)
    children = [[node for node, parent in enumerate(shape) if parent == at] for at in range(len(shape))]
    make = coupled if proposal == COUPLED else PROPOSALS[proposal]
    # a draft in progress: the tree, which place of the shape each node has, and which node is next to be expanded
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
            # dropped or not, the draft's choice tells something about the noise
            choice = coupled_choice(target.after(path), dist, picks[0].token) if target is not None else None
            longer = tree.extended(at, [picks[place] for place in kept], chance, choice)
            pending.append((longer, [*places, *(below[place] for place in kept)], at + 1))
    return done
