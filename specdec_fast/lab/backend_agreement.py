"""Same keys, same answer: every backend against the reference, any place in the batch, and all rules at temperature 0.

Tests: tests/lab/test_backend_agreement.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from specdec_fast.core.distributions import TokenDistributions
from specdec_fast.core.draft import Draft
from specdec_fast.interfaces import Acceptance, Rng, Rule, has_thresholds
from specdec_fast.lab.exact_distributions import takes_trees
from specdec_fast.lab.simulator import CHAIN, Layout, Simulator, layout_for
from specdec_fast.rules import get_rule
from specdec_kernels import OPS, UnsupportedError, distribution_stats, tree_plan, use_backend

DEEP = (-1, 0, 0, 1, 1, 3, 0)


@dataclass(frozen=True, slots=True)
class Agreement:
    """compared: rows; different: rows whose path, count or next token differ; largest: difference of any threshold or
    normalised residual weight, NaN where there are none.
    """

    rule: str
    what: str
    compared: int
    different: int
    largest: float = math.nan
    tolerance: float = 0.0

    @property
    def holds(self) -> bool:
        return self.different == 0 and not self.largest > self.tolerance

    def as_dict(self) -> dict[str, Any]:
        largest = None if math.isnan(self.largest) else self.largest
        return asdict(self) | {"largest": largest, "holds": self.holds}


def backends() -> list[str]:
    """Names of backends that are ready on this machine, the reference left out."""
    names = {each.name for op in OPS.values() for each in op.backends if each.missing() is None}
    return sorted(names - {"reference", "sdpa"})


def random_pair(vocab: int, seed: int, temperature: float = 1.0) -> tuple[TokenDistributions, TokenDistributions]:
    """A target distribution and a draft distribution near it, float32 [1, V]."""
    source = torch.Generator().manual_seed(seed)
    p = torch.randn(1, vocab, generator=source) * 2
    q = p + torch.randn(1, vocab, generator=source)
    return dist_index(p, temperature), dist_index(q, temperature)


def dist_index(logits: Tensor, temperature: float = 1.0) -> TokenDistributions:
    """The distributions of logits [R, V] at a temperature."""
    rows = len(logits)
    settings = (torch.full((rows,), temperature), torch.zeros(rows, dtype=torch.int32), torch.ones(rows))
    inv_t, lse, cut, tie_id, mass = distribution_stats(logits, *settings, torch.zeros(rows), masses=True)
    return TokenDistributions(logits, inv_t, lse, cut, tie_id, mass=mass)


def layouts(rule: Rule) -> list[Layout]:
    """Layouts on which backends are compared."""
    if rule.prefers in ("coupled", "greedy"):
        return [Layout(CHAIN, "coupled"), Layout(DEEP, "coupled")]
    if takes_trees(rule):
        return [Layout(DEEP, pick) for pick in ("hybrid", "without", "iid")] + [Layout(CHAIN, "sampled")]
    return [layout_for(rule), Layout((-1, 0, 1, 2, 3, 4), "sampled")]


def _answers(rule: Rule, draft: Draft, dists: TokenDistributions, rng: Rng) -> Acceptance:
    return rule(draft, tree_plan(draft.parents, draft.offsets), dists, rng)


def _different(a: Acceptance, b: Acceptance) -> Tensor:
    """bool [B]"""
    return (a.path != b.path).any(1) | (a.num_accepted != b.num_accepted) | (a.next_token != b.next_token)


def batch_for(rule: Rule, layout: Layout, vocab: int, rows: int, seed: int) -> tuple[Draft, TokenDistributions, Rng]:
    """A batch as the engine would hand it to a rule: drawn tokens, a target distribution of its own at every node."""
    temperature = 1.0 if rule.why_not_sampling(_Warm()) is None else 0.0
    p, q = random_pair(vocab, seed, temperature)
    simulator = Simulator(rule, p, q, layout)
    seeds = torch.arange(rows) + (seed << 20)
    positions = (torch.arange(rows) % 37).to(torch.int32)
    draft = simulator.draft(seeds, positions)
    source = torch.Generator().manual_seed(seed + 1)
    logits = p.logits + 0.5 * torch.randn(draft.num_nodes, vocab, generator=source)
    return draft, dist_index(logits, temperature), Rng(seeds, positions)


class _Warm:
    """Sampling parameters with a temperature, as far as rules ask."""

    temperature, top_k, top_p, min_p = 1.0, 0, 1.0, 0.0


def same_on_every_backend(name: str, vocabs: Sequence[int] = (7, 1030, 2500), rows: int = 96) -> list[Agreement]:
    """Path, count, next token and thresholds of each backend against the reference, with keyed randomness."""
    rule = get_rule(name)
    found = []
    for backend in backends():
        compared = different = 0
        largest = math.nan
        for at, vocab in enumerate(vocabs):
            for layout in layouts(rule):
                draft, dists, rng = batch_for(rule, layout, vocab, rows, seed=100 * at + 7)
                with use_backend("reference"):
                    want = _answers(rule, draft, dists, rng)
                    shown = _shown(rule, draft, dists)
                try:
                    with use_backend(backend):
                        got = _answers(rule, draft, dists, rng)
                        theirs = _shown(rule, draft, dists)
                except UnsupportedError:
                    continue
                compared += rows
                different += int(_different(want, got).sum())
                for ours, other in zip(shown, theirs):
                    off = torch.where(ours.isnan() & other.isnan(), 0.0, ours - other).abs().nan_to_num(nan=torch.inf)
                    largest = max(0.0 if math.isnan(largest) else largest, float(off.max()))
        if compared:
            found.append(Agreement(name, f"{backend} = reference", compared, different, largest, 2e-5))
    return found


def _shown(rule: Rule, draft: Draft, dists: TokenDistributions) -> list[Tensor]:
    """Thresholds and normalised residual weights, as far as the rule has them."""
    if not has_thresholds(rule):
        return []
    threshold, residual = rule.thresholds(draft, tree_plan(draft.parents, draft.offsets), dists)
    # where a node is accepted for certain its coin and what follows a refusal never matter
    total = residual.double().sum(1, keepdim=True)
    return [threshold.double(), torch.where(total > 1e-4, residual.double() / total, 0.0)]


def same_anywhere(name: str, rows: int = 48, vocab: int = 900) -> list[Agreement]:
    """A row's answer alone, in a ragged batch, and in the same batch in another order."""
    rule = get_rule(name)
    sizes = [layout for layout in layouts(rule) if not takes_trees(rule) or not layout.is_chain][:1]
    whole, every, rng = batch_for(rule, sizes[0], vocab, rows, seed=5)
    ragged = [1 + row % len(sizes[0].parents) for row in range(rows)]  # some rows draft nothing
    draft, dists = _take(whole, every, list(range(rows)), ragged)
    answer = _answers(rule, draft, dists, rng)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(3))
    turned = 0
    wrong_alone = wrong_order = 0
    many = _take(draft, dists, order.tolist())
    other = _answers(rule, *many, Rng(rng.seeds[order], rng.positions[order]))
    wrong_order = int(_unequal(answer, draft, order.tolist(), other, many[0]).sum())
    for row in range(0, rows, 4):
        one = _take(draft, dists, [row])
        alone = _answers(rule, *one, Rng(rng.seeds[row : row + 1], rng.positions[row : row + 1]))
        wrong_alone += int(_unequal(answer, draft, [row], alone, one[0]).sum())
        turned += 1
    return [
        Agreement(name, "a row alone = the row in a batch", turned, wrong_alone),
        Agreement(name, "any order of rows", rows, wrong_order),
    ]


def _take(
    draft: Draft, dists: TokenDistributions, rows: list[int], sizes: list[int] | None = None
) -> tuple[Draft, TokenDistributions]:
    """Some rows of a batch, in the given order; sizes: only so many nodes of each."""
    counts = tuple(draft.counts[row] for row in rows) if sizes is None else tuple(sizes)
    starts = draft.offsets.tolist()
    nodes = torch.cat([torch.arange(count) + starts[row] for row, count in zip(rows, counts)])
    offsets = [0]
    for count in counts:
        offsets.append(offsets[-1] + count)
    joined = Draft(
        rows=torch.arange(len(rows), dtype=torch.int32),
        tokens=draft.tokens[nodes],
        parents=draft.parents[nodes],
        offsets=torch.tensor(offsets, dtype=torch.int32),
        proposal_kinds=draft.proposal_kinds[nodes],
        dist_index=draft.dist_index[nodes],
        row_of=torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(counts)),
        counts=counts,
        max_depth=draft.max_depth,
        is_chain=draft.is_chain,
        dists=draft.dists,
    )
    return joined, dists.select(nodes)


def _unequal(a: Acceptance, of_a: Draft, rows: list[int], b: Acceptance, of_b: Draft) -> Tensor:
    """bool [len(rows)]: rows `rows` of `a` against the rows of `b`, paths counted from their roots."""
    index = torch.tensor(rows)
    starts_a, starts_b = of_a.offsets[:-1][index, None], of_b.offsets[:-1, None]
    path_a = torch.where(a.path[index] >= 0, a.path[index] - starts_a, -1)
    path_b = torch.where(b.path >= 0, b.path - starts_b, -1)
    return (path_a != path_b).any(1) | (a.next_token[index] != b.next_token)


def same_when_greedy(name: str, vocab: int = 50, rows: int = 64) -> Agreement:
    """At temperature 0 every rule follows the arg-max from the root: what a plain loop over the tree says."""
    rule = get_rule(name)
    trees = takes_trees(rule)
    parents = DEEP if trees else CHAIN
    source = torch.Generator().manual_seed(11)
    size = len(parents)
    logits = torch.randn(rows * size, vocab, generator=source)
    best = logits.argmax(1).view(rows, size)
    tokens = torch.randint(vocab, (rows, size), generator=source)
    for node, parent in enumerate(parents):
        if parent >= 0:  # half of the nodes are right
            right = torch.rand(rows, generator=source) < 0.5
            tokens[right, node] = best[right, parent]
    shape = Draft.trees(list(range(rows)), [(row, parents) for row in tokens.tolist()])
    draft = replace(shape, is_chain=not trees)
    dists = dist_index(logits, 0.0)
    rng = Rng(torch.arange(rows), torch.full((rows,), 5, dtype=torch.int32))
    answer = _answers(rule, draft, dists, rng)
    wrong = 0
    for row in range(rows):
        path, node = [0], 0
        while True:
            matching = [c for c in range(size) if parents[c] == node and tokens[row, c] == best[row, node]]
            if not matching:
                break
            node = matching[0]
            path.append(node)
        got = [at - row * size for at in answer.path[row].tolist() if at >= 0]
        same = [int(tokens[row, at]) for at in got[1:]] == [int(tokens[row, at]) for at in path[1:]]
        wrong += not (same and int(answer.next_token[row]) == int(best[row, node]))
    return Agreement(name, "temperature 0 = the arg-max path", rows, wrong)


def run_agreement(names: Sequence[str]) -> list[Agreement]:
    """Everything of this file, for every lossless rule."""
    found: list[Agreement] = []
    for name in names:
        if get_rule(name).lossless:
            found += same_on_every_backend(name)
            found += same_anywhere(name)
            found.append(same_when_greedy(name))
    return found
