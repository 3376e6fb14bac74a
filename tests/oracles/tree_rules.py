"""Tree verification in rational arithmetic: recursive rejection, traversal and block verification.

Written from the definitions: Miao et al. (2024), algorithm 2, with the conditional distributions of Jeon et al.
(2024) and Hu et al. (2025); Weng et al. (2025), algorithm 1; block verification from Sun et al. (2025), algorithm 2.
Every distribution is kept normalised, every probability is a fraction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product

from oracles.exact import Distribution, Text, point_mass

DETERMINISTIC, SAMPLED, WITHOUT_EARLIER, WITHOUT_CHOSEN = range(4)
ONE, ZERO = Fraction(1), Fraction(0)


@dataclass(frozen=True)
class Node:
    """A draft token: its parent (0 is the root), its proposal kind, and the draft distribution it comes from."""

    parent: int
    mark: int
    source: int = 0
    score_only_node: bool = False
    token: int = -1


@dataclass(frozen=True)
class DraftedTree:
    """A draft. nodes[0] is the root; p_after and q_after[source] are distributions after the text below the root."""

    nodes: tuple[Node, ...]
    p_after: Callable[[Text], Distribution]
    q_after: Sequence[Callable[[Text], Distribution]]

    def text(self, node: int) -> Text:
        """Tokens from below the root down to a node."""
        return () if node == 0 else (*self.text(self.nodes[node].parent), self.nodes[node].token)

    def children(self, node: int) -> list[int]:
        found = [at for at, each in enumerate(self.nodes) if at and each.parent == node]
        return [at for at in found if not self.nodes[at].score_only_node]

    def dist_of(self, node: int) -> list[Fraction] | None:
        """Returns the distribution that a node's token was sampled from, given its siblings; None if it is empty."""
        own = self.nodes[node]
        q = list(self.q_after[own.source](self.text(own.parent)))
        if own.mark == DETERMINISTIC:
            return point_mass(own.token, len(q))
        siblings = self.children(own.parent)
        if own.mark == WITHOUT_EARLIER:
            gone = [at for at in siblings if at < node and self.nodes[at].mark != DETERMINISTIC]
            gone = [at for at in gone if self.nodes[at].source == own.source]
        else:
            gone = [at for at in siblings if self.nodes[at].mark == DETERMINISTIC] if own.mark == WITHOUT_CHOSEN else []
        for at in gone:
            q[self.nodes[at].token] = ZERO
        return [weight / sum(q) for weight in q] if sum(q) else None


def normalised(weights: Sequence[Fraction]) -> list[Fraction]:
    return [weight / sum(weights) for weight in weights]


@dataclass
class Outcomes:
    """Outcomes of one step.

    Attributes:
        emitted: Probability of each emitted text.
        thresholds: Thresholds of the nodes that are tested with positive probability.
        dists: Distribution of the next token at each node where the path may end.
    """

    emitted: dict[Text, Fraction]
    thresholds: dict[int, Fraction]
    dists: dict[int, list[Fraction]]

    def emit(self, chance: Fraction, path: Text, dist: list[Fraction], node: int) -> None:
        self.dists[node] = dist
        for token, weight in enumerate(dist):
            if chance * weight:
                text = (*path, token)
                self.emitted[text] = self.emitted.get(text, ZERO) + chance * weight


def ordered(tree: DraftedTree) -> Outcomes:
    """Recursive rejection: children are tested in order, and each rejection replaces p by the normalised residual."""
    out = Outcomes({}, {}, {})

    def walk(node: int, chance: Fraction) -> None:
        dist = list(tree.p_after(tree.text(node)))
        for child in tree.children(node):
            token, q = tree.nodes[child].token, tree.dist_of(child)
            assert q is not None and q[token] > 0
            accept = min(ONE, dist[token] / q[token])
            out.thresholds[child] = accept
            if accept:
                walk(child, chance * accept)
            chance *= 1 - accept
            if not chance:
                return
            dist = normalised([max(a - b, ZERO) for a, b in zip(dist, q, strict=True)])
        out.emit(chance, tree.text(node), dist, node)

    walk(0, ONE)
    return out


def traversal(tree: DraftedTree) -> Outcomes:
    """Traversal verification: a node is tested only after all nodes below it are rejected."""
    out = Outcomes({}, {}, {})

    def visit(node: int, reach: Fraction, chance: Fraction) -> Fraction:
        """Returns the probability that this node and all nodes tested before it are rejected."""
        dist = list(tree.p_after(tree.text(node)))
        for child in tree.children(node):
            token, q = tree.nodes[child].token, tree.dist_of(child)
            assert q is not None and q[token] > 0
            if not chance:
                return ZERO
            chance = visit(child, min(ONE, reach * dist[token] / q[token]), chance)
            rest = [max(reach * a - b, ZERO) for a, b in zip(dist, q, strict=True)]
            if sum(rest):
                dist, reach = normalised(rest), sum(rest) / (sum(rest) + 1 - reach)
            elif reach < 1:
                reach = ZERO
        if not chance:
            return ZERO
        out.thresholds[node] = reach
        if reach:
            out.emit(chance * reach, tree.text(node), dist, node)
        return chance * (1 - reach)

    assert visit(0, ONE, ONE) == 0
    return out


def block(chain: Text, p: Sequence[Distribution], q: Sequence[Distribution]) -> dict[Text, Fraction]:
    """Returns the outcomes of block verification of K draft tokens, from K + 1 target and K draft distributions."""
    size, weights = len(chain), [ONE]
    for at, token in enumerate(chain):
        weights.append(min(ONE, weights[-1] * p[at][token] / q[at][token]))
    accept = []
    for at in range(1, size):
        rest = sum(max(weights[at] * a - b, ZERO) for a, b in zip(p[at], q[at], strict=True))
        accept.append(rest / (rest + 1 - weights[at]) if rest + 1 - weights[at] else ONE)
    accept.append(weights[size])
    out, chance = Outcomes({}, {}, {}), ONE
    for at in range(size, -1, -1):  # the largest place whose test passes
        share = accept[at - 1] if at else ONE
        if at == size:
            dist = list(p[size])
        else:
            dist = [max(weights[at] * a - b, ZERO) for a, b in zip(p[at], q[at], strict=True)]
        if chance * share:
            out.emit(chance * share, chain[:at], normalised(dist), at)
        chance *= 1 - share
    return out.emitted


def drafted(
    shape: Sequence[Node],
    p_after: Callable[[Text], Distribution],
    q_after: Sequence[Callable[[Text], Distribution]],
    deterministic_after: Callable[[Text, int], int],
) -> Iterator[tuple[Fraction, DraftedTree]]:
    """Yields every tree that a drafter with this shape may propose, with its probability.

    deterministic_after(text, node) is the token of a deterministic or score-only node. If the exclusions of a node
    leave no token, it is sampled from the whole distribution and gets that kind.
    """

    def fill(tree: DraftedTree, at: int, chance: Fraction) -> Iterator[tuple[Fraction, DraftedTree]]:
        if at == len(tree.nodes):
            yield chance, tree
            return
        nodes = list(tree.nodes)
        for other in range(at, len(nodes)):
            fixed = nodes[other].mark == DETERMINISTIC or nodes[other].score_only_node
            known = nodes[other].parent < at
            if fixed and known and nodes[other].token < 0:
                nodes[other] = replace(nodes[other], token=deterministic_after(tree.text(nodes[other].parent), other))
        tree = replace(tree, nodes=tuple(nodes))
        if nodes[at].token >= 0:
            yield from fill(tree, at + 1, chance)
            return
        dist = tree.dist_of(at)
        if dist is None:
            nodes[at] = replace(nodes[at], mark=SAMPLED)
            tree = replace(tree, nodes=tuple(nodes))
            dist = tree.dist_of(at)
            assert dist is not None
        for token, weight in enumerate(dist):
            if weight:
                nodes[at] = replace(nodes[at], token=token)
                yield from fill(replace(tree, nodes=tuple(nodes)), at + 1, chance * weight)

    yield from fill(DraftedTree((Node(-1, DETERMINISTIC, token=0), *shape), p_after, q_after), 1, ONE)


def continued(
    emitted: dict[Text, Fraction], p_after: Callable[[Text], Distribution], length: int
) -> dict[Text, Fraction]:
    """Returns the joint distribution of `length` tokens if plain decoding follows one step."""
    found: dict[Text, Fraction] = {}
    pending = list(emitted.items())
    while pending:
        text, chance = pending.pop()
        if len(text) >= length:
            found[text[:length]] = found.get(text[:length], ZERO) + chance
            continue
        pending.extend(((*text, token), chance * weight) for token, weight in enumerate(p_after(text)) if weight)
    return found


def shapes(nodes: int) -> Iterator[tuple[int, ...]]:
    """Yields the parents of nodes 1, 2, ... of all trees with `nodes` draft nodes."""
    yield from product(*(range(at + 1) for at in range(nodes)))
