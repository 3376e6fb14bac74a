"""The distribution of the tokens that one step emits, by enumeration of its accept tests.

A rule with accept tests reports their `thresholds`. For every combination of passing and failing tests, the rule itself
runs on `uniforms` that produce it. So its own walk decides what is accepted. The residual weights at the end of the
walk are the distribution of the next token. Replay has no accept tests: every combination of the target's choices takes
their place, by distributions that allow one token each. Each combination is a cell.

Steps after many contexts are one batch. Tests: tests/lab/test_step_enumeration.py,
tests/lab/test_exact_distributions.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from specdec_fast.core.distributions import TokenDistributions
from specdec_fast.core.draft import Draft
from specdec_fast.interfaces import Acceptance, Rng, Rule, ThresholdRule, has_thresholds
from specdec_fast.lab.draft_enumeration import DraftTree
from specdec_fast.lab.rational_oracle import Distribution, Text
from specdec_kernels import distribution_stats, tree_plan

_NUDGE = 1e-6  # uniforms are this close to their thresholds, so that a threshold applied in another place shows

Outcomes = dict[Text, float]


def packed_dists(rows: Sequence[Distribution]) -> TokenDistributions:
    """Converts rational distributions to float64 logits with statistics at temperature 1."""
    return _dists_of(torch.tensor([[float(weight) for weight in row] for row in rows], dtype=torch.float64).log())


def _dists_of(logits: torch.Tensor) -> TokenDistributions:
    """Distributions of logits [R, V] at temperature 1."""
    count = len(logits)
    temperature, top_k = torch.ones(count), torch.zeros(count, dtype=torch.int32)
    return TokenDistributions(
        logits, *distribution_stats(logits, temperature, top_k, torch.ones(count), torch.zeros(count))
    )


def depth_first(tree: DraftTree) -> DraftTree:
    """Reorders a draft depth-first: every node is directly followed by its first child. The tree stays the same."""
    children: list[list[int]] = [[] for _ in tree.tokens]
    for node, parent in enumerate(tree.parents[1:], 1):
        children[parent].append(node)
    order: list[int] = []
    stack = [0]
    while stack:
        node = stack.pop()
        order.append(node)
        stack.extend(reversed(children[node]))
    new = {node: at for at, node in enumerate(order)}
    return DraftTree(
        tree.chance,
        [tree.tokens[node] for node in order],
        [new.get(tree.parents[node], -1) for node in order],
        [tree.proposal_kinds[node] for node in order],
        [tree.dist[node] for node in order],
        [tree.text[node] for node in order],
        [tree.choice[node] for node in order],
    )


class _UniqueDists:
    """Collects distinct distributions in order of first use."""

    def __init__(self) -> None:
        self._rows: dict[tuple[Any, ...], int] = {}
        # models return the same object for a context, and fractions are slow to hash; references keep ids unique
        self._seen: dict[int, tuple[Distribution, int]] = {}

    def row(self, dist: Distribution) -> int:
        """Returns the row of a distribution."""
        if id(dist) not in self._seen:
            self._seen[id(dist)] = dist, self._rows.setdefault(tuple(dist), len(self._rows))
        return self._seen[id(dist)][1]

    def packed(self) -> TokenDistributions | None:
        """Returns all rows, or None if there are none."""
        return packed_dists(list(self._rows)) if self._rows else None


def pack(
    drafts: Sequence[tuple[Text, DraftTree]], after: Callable[[Text], Distribution]
) -> tuple[Draft, TokenDistributions]:
    """Packs drafts as one ragged batch.

    Args:
        drafts: Context and tree of each row.
        after: The target's distribution after a text.

    Returns:
        The batch, and the target's distribution after each of its M nodes.
    """
    sources, targets = _UniqueDists(), _UniqueDists()
    tokens: list[int] = []
    parents: list[int] = []
    kinds: list[int] = []
    dist_index: list[int] = []
    row_of: list[int] = []
    target_row: list[int] = []
    for row, (context, tree) in enumerate(drafts):
        tokens += tree.tokens
        parents += tree.parents
        kinds += map(int, tree.proposal_kinds)
        dist_index += [-1 if dist is None else sources.row(dist) for dist in tree.dist]
        target_row += [targets.row(after((*context, *text))) for text in tree.text]
        row_of += [row] * len(tree.tokens)
    counts = tuple(len(tree.tokens) for _, tree in drafts)
    draft = Draft(
        rows=torch.arange(len(drafts), dtype=torch.int32),
        tokens=torch.tensor(tokens),
        parents=torch.tensor(parents, dtype=torch.int32),
        offsets=torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32),
        proposal_kinds=torch.tensor(kinds, dtype=torch.int8),
        dist_index=torch.tensor(dist_index, dtype=torch.int32),
        row_of=torch.tensor(row_of),
        counts=counts,
        max_depth=max(len(text) for _, tree in drafts for text in tree.text),
        is_chain=all(parent == node - 1 for _, tree in drafts for node, parent in enumerate(tree.parents)),
        dists=sources.packed(),
    )
    packed = targets.packed()
    assert packed is not None
    return draft, packed.select(torch.tensor(target_row))


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies of the rows of a batch.

    Attributes:
        draft: The copies, as a batch.
        dists: The target's distributions after its nodes.
        source: Original row of every copy.
        number: Index of every copy among those of its row.
        nodes: Original node of every node.
    """

    draft: Draft
    dists: TokenDistributions
    source: np.ndarray
    number: np.ndarray
    nodes: np.ndarray


def copies_of(draft: Draft, dists: TokenDistributions, times: np.ndarray) -> Copies:
    """Copies row r of a batch `times[r]` times. The copies of a row are adjacent."""
    counts = np.asarray(draft.counts)
    source = np.repeat(np.arange(len(counts)), times)
    number = np.arange(len(source)) - np.repeat(np.cumsum(times) - times, times)
    sizes = counts[source]
    row_of = np.repeat(np.arange(len(source)), sizes)
    inside = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    nodes = draft.offsets.numpy()[:-1].astype(np.int64)[source][row_of] + inside
    index = torch.from_numpy(nodes)
    many = Draft(
        rows=torch.arange(len(source), dtype=torch.int32),
        tokens=draft.tokens[index],
        parents=draft.parents[index],
        offsets=torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)),
        proposal_kinds=draft.proposal_kinds[index],
        dist_index=draft.dist_index[index],
        row_of=torch.from_numpy(row_of),
        counts=tuple(sizes.tolist()),
        max_depth=draft.max_depth,
        is_chain=draft.is_chain,
        dists=draft.dists,
    )
    return Copies(many, dists.select(index), source, number, nodes)


@dataclass(frozen=True, slots=True)
class Cells:
    """Cells of a batch of steps, one for every combination of random outcomes.

    Attributes:
        source: Row of the batch of every cell, [N].
        chance: Probability of every cell, given its row, [N].
        emitted: Accepted tokens, int64 [N, depth], padded with -1.
        residual: Unnormalised weights of the next token, [N, V].
    """

    source: np.ndarray
    chance: np.ndarray
    emitted: np.ndarray
    residual: np.ndarray


def _verify(rule: Rule, draft: Draft, dists: TokenDistributions, **uniforms: torch.Tensor) -> Acceptance:
    """Runs a rule with arbitrary keys, and with given uniforms if it has thresholds."""
    rows = draft.num_rows
    rng = Rng(torch.arange(rows), torch.full((rows,), 9, dtype=torch.int32))
    return rule(draft, tree_plan(draft.parents, draft.offsets), dists, rng, **uniforms)


def threshold_cells(rule: ThresholdRule, draft: Draft, dists: TokenDistributions) -> Cells:
    """Enumerates all combinations of accept tests that pass and fail.

    Args:
        rule: A rule with thresholds.
        draft: The batch.
        dists: The target's distribution after each node.

    Returns:
        The cells.

    Raises:
        AssertionError: If a threshold is outside [0, 1], or a path is not one of the draft.
    """
    plan = tree_plan(draft.parents, draft.offsets)
    threshold, residual = (part.double().numpy() for part in rule.thresholds(draft, plan, dists))
    inner = draft.parents.numpy() >= 0
    if not ((threshold >= 0) & (threshold <= 1)).all():
        raise AssertionError(f"rule {rule.name}: thresholds from {threshold.min()} to {threshold.max()} leave [0, 1]")
    open_ = inner & (threshold > 1e-13) & (threshold < 1 - 1e-13)  # the outcome of the others is certain
    of_row = draft.row_of.numpy()
    per_row = np.bincount(of_row[open_], minlength=len(draft.counts))
    before: np.ndarray = np.cumsum(open_) - open_
    bit = before - (np.cumsum(per_row) - per_row)[of_row]
    many = copies_of(draft, dists, 2**per_row)
    number = many.number[many.draft.row_of.numpy()]
    is_open, level = open_[many.nodes], threshold[many.nodes]
    passes = np.where(is_open, (number >> bit[many.nodes]) & 1, level > 0.5).astype(bool)
    beside = np.where(passes, level * (1 - _NUDGE), np.minimum(level * (1 + _NUDGE), (1 + level) / 2))
    uniforms = np.where(is_open, beside, 0.5).astype(np.float32)
    # uniforms are in (0, 1); a threshold of 1e-13 or more is further from both than any nudge
    uniforms = np.clip(uniforms, np.float32(2.0**-60), np.float32(1 - 2.0**-24))
    factor = np.where(is_open, np.where(passes, level, 1 - level), 1.0)
    rows = len(many.source)
    acceptance = _verify(rule, many.draft, many.dists, uniforms=torch.from_numpy(uniforms))
    path, emitted = accepted_paths(many.draft, acceptance)
    chance = np.exp(np.bincount(many.draft.row_of.numpy(), weights=np.log(factor), minlength=rows))
    return Cells(many.source, chance, emitted, residual[many.nodes[path.max(1)]])


def choice_cells(rule: Rule, draft: Draft, dists: TokenDistributions, weights: np.ndarray) -> Cells:
    """Enumerates all combinations of the target's choices. The rule gets each of them as point masses.

    In every cell, the emitted tokens must be the target's choices. Drafts that are coupled with the noise can therefore
    change only how many tokens a step emits. The choice at a leaf is the next token and decides nothing else, so one
    choice represents all of them.

    Args:
        rule: A rule that replays.
        draft: The batch.
        dists: The target's distribution after each node.
        weights: Probabilities of the target's choice after each node, given the node's children, [M, V].

    Returns:
        The cells.

    Raises:
        AssertionError: If an emitted token is not the target's choice, or a path is not one of the draft.
    """
    support = weights > 0
    leaf = np.ones(draft.num_nodes, dtype=bool)
    start = draft.offsets.numpy()[:-1].astype(np.int64)
    parents = draft.parents.numpy()
    leaf[(start[draft.row_of.numpy()] + parents)[parents >= 0]] = False
    options = np.where(leaf, 1, support.sum(1))
    many = copies_of(draft, dists, np.multiply.reduceat(options, start))
    of_row = many.draft.row_of.numpy()
    size = options[many.nodes]
    # mixed-radix digits of the copy's number, node by node
    place = np.arange(len(size)) - many.draft.offsets.numpy()[:-1].astype(np.int64)[of_row]
    stride = np.ones(len(size), dtype=np.int64)
    for number in range(1, int(place.max()) + 1):
        at = np.nonzero(place == number)[0]
        stride[at] = stride[at - 1] * size[at - 1]
    digit = many.number[of_row] // stride % size
    ranked = np.argsort(~support, axis=1, kind="stable")  # tokens with weight first
    choice = ranked[many.nodes, digit]
    chance_of_choice = np.where(leaf[many.nodes], 1.0, weights[many.nodes, choice])
    certain = np.full((len(choice), weights.shape[1]), -np.inf)
    certain[np.arange(len(choice)), choice] = 0.0
    acceptance = _verify(rule, many.draft, _dists_of(torch.from_numpy(certain)))
    path, emitted = accepted_paths(many.draft, acceptance)
    last, following = path.max(1), acceptance.next_token.numpy()
    expected = np.where(path[:, 1:] >= 0, choice[path[:, :-1]], -1)
    if not (np.array_equal(expected, emitted) and np.array_equal(choice[last], following)):
        raise AssertionError("replay: got tokens that are not the target's choices; expected them and no others")
    residual = np.zeros((len(last), weights.shape[1]))
    residual[np.arange(len(last)), following] = 1.0
    ends = leaf[many.nodes[last]]
    residual[ends] = weights[many.nodes[last[ends]]]
    chance = np.exp(np.bincount(of_row, weights=np.log(chance_of_choice), minlength=len(many.source)))
    return Cells(many.source, chance, emitted, residual)


def accepted_paths(draft: Draft, acceptance: Any) -> tuple[np.ndarray, np.ndarray]:
    """Checks the paths of an acceptance and reads their tokens.

    Args:
        draft: The batch.
        acceptance: The rule's `Acceptance`.

    Returns:
        Paths [B, depth + 1] and accepted tokens [B, depth], both padded with -1.

    Raises:
        AssertionError: If a path is not one of the draft.
    """
    path, count = acceptance.path.numpy().astype(np.int64), acceptance.num_accepted.numpy()
    start, parents = draft.offsets.numpy()[:-1], draft.parents.numpy()
    on = np.arange(path.shape[1]) <= count[:, None]
    links = start[:, None] + parents[path[:, 1:]] == path[:, :-1]
    whole = (path[:, 0] == start) & (links | ~on[:, 1:]).all(1) & (on == (path >= 0)).all(1)
    if not whole.all():
        row = int(np.argmin(whole))
        raise AssertionError(
            f"row {row}: got path {path[row].tolist()} of {count[row]} accepted nodes; expected a path of the draft"
        )
    return path, np.where(on[:, 1:], draft.tokens.numpy()[path[:, 1:]], -1)


def step_outcomes(
    rule: Rule, drafts: Mapping[Text, Sequence[DraftTree]], after: Callable[[Text], Distribution]
) -> dict[Text, tuple[Outcomes, float]]:
    """Computes the exact outcome of one step after each context.

    Args:
        rule: The rule.
        drafts: All possible drafts of each context, with their probabilities.
        after: The target's distribution after a text.

    Returns:
        For each context, the distribution of the emitted tokens and the expected number of accepted tokens.
    """
    rows = [
        (context, depth_first(tree) if at % 2 else tree)
        for context, trees in drafts.items()
        for at, tree in enumerate(trees)
    ]
    draft, dists = pack(rows, after)
    if rule.replays:
        cells = choice_cells(rule, draft, dists, _choices([tree for _, tree in rows], dists))
    else:
        cells = threshold_cells(_with_thresholds(rule), draft, dists)
    number = {context: at for at, context in enumerate(drafts)}
    context_of = np.array([number[context] for context, _ in rows])[cells.source]
    chance = np.array([float(tree.chance) for _, tree in rows])[cells.source] * cells.chance
    total = np.maximum(cells.residual.sum(1), np.finfo(np.float64).tiny)
    walks, which = np.unique(np.column_stack([context_of, cells.emitted]), axis=0, return_inverse=True)
    dist = np.zeros((len(walks), cells.residual.shape[1]))
    np.add.at(dist, which.ravel(), (chance / total)[:, None] * cells.residual)
    outcomes: list[Outcomes] = [{} for _ in drafts]
    for (at, *padded), shares in zip(walks.tolist(), dist.tolist()):
        path = tuple(token for token in padded if token >= 0)
        outcomes[at] |= {(*path, token): share for token, share in enumerate(shares) if share > 0}
    accepted = np.bincount(context_of, weights=chance * (cells.emitted >= 0).sum(1), minlength=len(drafts))
    return dict(zip(drafts, zip(outcomes, accepted.tolist())))


def _choices(trees: Sequence[DraftTree], dists: TokenDistributions) -> np.ndarray:
    """Probabilities of the target's choices [M, V], given the draft; p where the draft gives no information."""
    weights = dists.probs().numpy()
    for node, choice in enumerate(choice for tree in trees for choice in tree.choice):
        if choice is not None:
            weights[node] = [float(weight) for weight in choice]
    return weights


def _with_thresholds(rule: Rule) -> ThresholdRule:
    """Returns the rule. Raises ValueError if it has no thresholds."""
    if not has_thresholds(rule):
        raise ValueError(f"rule {rule.name}: got a rule without `thresholds`; expected thresholds or replay")
    return rule
