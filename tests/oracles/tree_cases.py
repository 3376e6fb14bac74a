"""Small drafters on trees, and the checks of rules `recursive_rejection` and `traversal` on each of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product

import torch

from oracles.exact import Text, target_dist
from oracles.rational_models import RationalModel
from oracles.tree_drafts import packed
from oracles.tree_rules import DraftedTree, Node, Outcomes, continued, drafted, shapes
from specdec_fast.core.distributions import TokenDistributions
from specdec_fast.core.draft import Draft
from specdec_fast.interfaces import Rng, ThresholdRule
from specdec_kernels import TreePlan, tree_plan

Oracle = Callable[[DraftedTree], Outcomes]


@dataclass(frozen=True)
class Case:
    """A drafter: the shape of its trees and the proposal kind of each node. Vocabulary and distributions come from the
    seed.
    """

    vocab: int
    parents: tuple[int, ...]
    marks: tuple[int, ...]
    seed: int
    score_only: tuple[int, ...] = ()

    @property
    def target(self) -> RationalModel:
        return RationalModel(self.vocab, self.seed)

    def trees(self) -> list[tuple[Fraction, DraftedTree]]:
        """Returns all proposals at the start of a text."""
        target = self.target
        drafts = [RationalModel(self.vocab, self.seed + 5000, like=target), RationalModel(self.vocab, self.seed + 9000)]
        source = random.Random(self.seed)
        shape = [
            Node(parent, mark, int(source.random() < 0.25), at in self.score_only)
            for at, (parent, mark) in enumerate(zip(self.parents, self.marks, strict=True), 1)
        ]
        token_of = lambda text, node: (len(text) + node + self.seed) % self.vocab  # noqa: E731
        return list(drafted(shape, target.after, [draft.after for draft in drafts], token_of))


def ids(case: Case) -> str:
    score_only = "".join(f"-score-only node{at}" for at in case.score_only)
    return f"v{case.vocab}-{''.join(map(str, case.parents))}-{''.join('cdew'[mark] for mark in case.marks)}{score_only}"


def _cases() -> Iterator[Case]:
    seed = 0
    for nodes in (1, 2):
        for parents in shapes(nodes):
            for marks in product(range(4), repeat=nodes):
                seed += 1
                yield Case(3, parents, marks, seed)
    for parents in shapes(3):
        for marks in product(range(4), repeat=3):
            seed += 1
            if seed % 3 == 0 or parents == (0, 0, 0):
                yield Case(3, parents, marks, seed)
    source = random.Random(4)
    for parents in shapes(4):
        for _ in range(2):
            seed += 1
            yield Case(3, parents, tuple(source.randrange(4) for _ in range(4)), seed)
    for parents in ((0, 0), (0, 0, 0), (0, 1, 1), (0, 0, 1), (0, 1, 2)):
        for _ in range(4):
            seed += 1
            yield Case(4, parents, tuple(source.randrange(4) for _ in parents), seed)
    yield Case(3, (0, 0, 1), (1, 0, 1), seed + 1, score_only=(2,))
    yield Case(3, (0, 0, 2), (0, 3, 0), seed + 2, score_only=(1,))


CASES = list(_cases())
SMALL = [case for case in CASES if len(case.marks) <= 2] + CASES[-2:]


def emitted(case: Case, oracle: Oracle) -> dict[Text, Fraction]:
    """Returns the distribution of the tokens of one step."""
    dist: dict[Text, Fraction] = {}
    for chance, tree in case.trees():
        for text, share in oracle(tree).emitted.items():
            dist[text] = dist.get(text, Fraction(0)) + chance * share
    return dist


def accepted(case: Case, oracle: Oracle) -> Fraction:
    """Returns the expected number of accepted tokens of one step."""
    total = Fraction(0)
    for chance, tree in case.trees():
        for text, share in oracle(tree).emitted.items():
            total += chance * share * (len(text) - 1)
    return total


def check_oracle(case: Case, oracle: Oracle) -> None:
    """Checks that the rational rule emits exactly the target's distribution: tokens of one step, followed by plain
    decoding.
    """
    length = 1 + max(len(tree.text(at)) for _, tree in case.trees() for at in range(len(tree.nodes)))
    found = continued(emitted(case, oracle), case.target.after, length)
    assert {text: chance for text, chance in found.items() if chance} == target_dist(case.target.after, length)


def seen(
    case: Case, rule: ThresholdRule | OverColumns
) -> tuple[list[tuple[Fraction, DraftedTree]], Draft, torch.Tensor, torch.Tensor]:
    trees = case.trees()
    draft, dists = packed([tree for _, tree in trees])
    threshold, residual = rule.thresholds(draft, tree_plan(draft.parents, draft.offsets), dists)
    assert threshold.dtype == residual.dtype == torch.float64 and residual.shape == dists.logits.shape
    return trees, draft, threshold, residual


class OverColumns:
    """A rule that gets draft distributions over permuted columns: column v is another id than v."""

    def __init__(self, rule: ThresholdRule) -> None:
        self.rule = rule

    def thresholds(
        self, draft: Draft, plan: TreePlan, target_dists: TokenDistributions
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if draft.dists is not None:
            ids = torch.arange(draft.dists.logits.shape[1]).roll(1)
            dists = replace(draft.dists, logits=draft.dists.logits[:, ids], token_ids=ids)
            draft = replace(draft, dists=dists)
        return self.rule.thresholds(draft, plan, target_dists)


def check_cells(case: Case, rule: ThresholdRule | OverColumns, oracle: Oracle) -> None:
    """Checks thresholds and residuals against the oracle, at every node that is reached with positive probability."""
    trees, draft, threshold, residual = seen(case, rule)
    for row, (_, tree) in enumerate(trees):
        want, start = oracle(tree), int(draft.offsets[row])
        for node, value in want.thresholds.items():
            assert abs(float(threshold[start + node]) - float(value)) < 1e-12, (tree, node)
        for node, dist in want.dists.items():
            got = residual[start + node] / residual[start + node].sum()
            assert (got - torch.tensor([float(w) for w in dist], dtype=torch.float64)).abs().max() < 1e-12, (tree, node)
        for node, each in enumerate(tree.nodes):
            assert not each.score_only_node or float(threshold[start + node]) == 0


def ends(tree: DraftedTree, threshold: Sequence[float], order: str) -> Iterator[tuple[float, int]]:
    """Returns (probability, last node) of every possible path, from thresholds alone."""
    if order == "post":
        alive = 1.0

        def visit(node: int) -> Iterator[tuple[float, int]]:
            nonlocal alive
            for child in tree.children(node):
                yield from visit(child)
            yield alive * threshold[node], node
            alive *= 1 - threshold[node]

        yield from visit(0)
        return

    def walk(node: int, chance: float) -> Iterator[tuple[float, int]]:
        for child in tree.children(node):
            yield from walk(child, chance * threshold[child])
            chance *= 1 - threshold[child]
        yield chance, node

    yield from walk(0, 1.0)


def dist_of_cells(case: Case, rule: ThresholdRule | OverColumns, order: str) -> tuple[dict[Text, float], int]:
    """Returns the joint distribution of one step by thresholds and residuals, followed by plain decoding, and its
    number of tokens.
    """
    trees, draft, threshold, residual = seen(case, rule)
    dist: dict[Text, float] = {}
    for row, (chance, tree) in enumerate(trees):
        start, stop = int(draft.offsets[row]), int(draft.offsets[row + 1])
        for share, node in ends(tree, threshold[start:stop].tolist(), order):
            if share > 0:
                weights = residual[start + node] / residual[start + node].sum()
                for token, weight in enumerate(weights.tolist()):
                    text = (*tree.text(node), token)
                    dist[text] = dist.get(text, 0.0) + float(chance) * share * weight
    length = max(map(len, dist))
    after = case.target.after
    found = continued(dist, lambda text: [float(w) for w in after(text)], length)  # type: ignore[arg-type,return-value]
    return found, length  # type: ignore[return-value]


def check_dist(case: Case, rule: ThresholdRule | OverColumns, order: str) -> None:
    """Checks that thresholds and residuals give the target's distribution."""
    found, length = dist_of_cells(case, rule, order)
    exact = target_dist(case.target.after, length)
    for text in product(range(case.vocab), repeat=length):
        assert abs(found.get(text, 0.0) - float(exact.get(text, 0))) < 1e-12, text


def check_walk(case: Case, rule: ThresholdRule, order: str) -> None:
    """Checks paths for uniforms just below and just above the thresholds, in all combinations."""
    trees, _, limits, _ = seen(case, rule)
    rows: list[tuple[DraftedTree, list[float], list[float]]] = []
    at = 0
    for _, tree in trees:
        own = limits[at : at + len(tree.nodes)].tolist()
        at += len(tree.nodes)
        for passes in product((True, False), repeat=len(tree.nodes) - 1):
            uniforms = [0.5, *(limit - 1e-5 if go else limit + 1e-5 for limit, go in zip(own[1:], passes, strict=True))]
            if all(0 < uniform < 1 for uniform in uniforms):
                rows.append((tree, uniforms, own))
    if not rows:
        return
    draft, dists = packed([tree for tree, _, _ in rows])
    plan = tree_plan(draft.parents, draft.offsets)
    seeds = torch.arange(len(rows))
    uniforms = torch.tensor([uniform for _, uniforms, _ in rows for uniform in uniforms], dtype=torch.float32)
    acceptance = rule(draft, plan, dists, Rng(seeds, torch.full((len(rows),), 7, dtype=torch.int32)), uniforms)
    _, left = rule.thresholds(draft, plan, dists)
    for row, (tree, uniforms, own) in enumerate(rows):
        decided = [float(uniform < limit) for uniform, limit in zip(uniforms, own, strict=True)]
        decided[0] = 1.0
        (last,) = (node for share, node in ends(tree, decided, order) if share)
        start = int(draft.offsets[row])
        path = _path_to(tree, last)
        got = acceptance.path[row][acceptance.path[row] >= 0] - start
        assert got.tolist() == path and int(acceptance.num_accepted[row]) == len(path) - 1
        assert left[start + last, acceptance.next_token[row]] > 0


def _path_to(tree: DraftedTree, node: int) -> list[int]:
    return [0] if node == 0 else [*_path_to(tree, tree.nodes[node].parent), node]
