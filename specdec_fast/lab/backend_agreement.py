"""Agreement checks: rules must return the same tokens for the same random keys.

Every backend is compared with the reference, every position in a batch with the request alone, and every rule at
temperature 0 with the arg-max path.
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
"""Parents of a tree of three levels."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """Outcome of one comparison.

    Attributes:
        rule: Name of the rule.
        what: The comparison, in words.
        compared: Number of compared rows.
        different: Number of rows whose path, number of accepted tokens or next token differs.
        largest: Largest difference of a threshold or of a normalised residual weight. NaN if nothing was compared.
        tolerance: Largest difference that is allowed.
    """

    rule: str
    what: str
    compared: int
    different: int
    largest: float = math.nan
    tolerance: float = 0.0

    @property
    def holds(self) -> bool:
        """Whether all rows agree and no threshold differs by more than the tolerance."""
        return self.different == 0 and not self.largest > self.tolerance

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields for JSON."""
        largest = None if math.isnan(self.largest) else self.largest
        return asdict(self) | {"largest": largest, "holds": self.holds}


def backends() -> list[str]:
    """Returns the names of the backends that are available on this machine, except the reference."""
    names = {each.name for op in OPS.values() for each in op.backends if each.missing() is None}
    return sorted(names - {"reference", "sdpa"})


def random_pair(vocab: int, seed: int, temperature: float = 1.0) -> tuple[TokenDistributions, TokenDistributions]:
    """Returns a random target distribution and a draft distribution near it, float32 [1, V] each."""
    source = torch.Generator().manual_seed(seed)
    p = torch.randn(1, vocab, generator=source) * 2
    q = p + torch.randn(1, vocab, generator=source)
    return dists_of_logits(p, temperature), dists_of_logits(q, temperature)


def dists_of_logits(logits: Tensor, temperature: float = 1.0) -> TokenDistributions:
    """Returns the distributions of logits [R, V] at a temperature."""
    rows = len(logits)
    settings = (torch.full((rows,), temperature), torch.zeros(rows, dtype=torch.int32), torch.ones(rows))
    inv_t, lse, cut, tie_id, mass = distribution_stats(logits, *settings, torch.zeros(rows), masses=True)
    return TokenDistributions(logits, inv_t, lse, cut, tie_id, mass=mass)


def layouts(rule: Rule) -> list[Layout]:
    """Returns the draft layouts on which backends are compared for a rule."""
    if rule.prefers in ("coupled", "greedy"):
        return [Layout(CHAIN, "coupled"), Layout(DEEP, "coupled")]
    if takes_trees(rule):
        return [Layout(DEEP, pick) for pick in ("hybrid", "without", "iid")] + [Layout(CHAIN, "sampled")]
    return [layout_for(rule), Layout((-1, 0, 1, 2, 3, 4), "sampled")]


def _verify(rule: Rule, draft: Draft, dists: TokenDistributions, rng: Rng) -> Acceptance:
    """Runs a rule with the plan of the draft."""
    return rule(draft, tree_plan(draft.parents, draft.offsets), dists, rng)


def _different(a: Acceptance, b: Acceptance) -> Tensor:
    """Marks the rows whose acceptance differs, bool [B]."""
    return (a.path != b.path).any(1) | (a.num_accepted != b.num_accepted) | (a.next_token != b.next_token)


def batch_for(rule: Rule, layout: Layout, vocab: int, rows: int, seed: int) -> tuple[Draft, TokenDistributions, Rng]:
    """Builds a batch as the engine does, with sampled drafts and a separate target distribution after every node."""
    temperature = 1.0 if rule.why_not_sampling(_PositiveTemperature()) is None else 0.0
    p, q = random_pair(vocab, seed, temperature)
    simulator = Simulator(rule, p, q, layout)
    seeds = torch.arange(rows) + (seed << 20)
    positions = (torch.arange(rows) % 37).to(torch.int32)
    draft = simulator.draft(seeds, positions)
    source = torch.Generator().manual_seed(seed + 1)
    logits = p.logits + 0.5 * torch.randn(draft.num_nodes, vocab, generator=source)
    return draft, dists_of_logits(logits, temperature), Rng(seeds, positions)


class _PositiveTemperature:
    """The sampling parameters that rules read, at temperature 1."""

    temperature, top_k, top_p, min_p = 1.0, 0, 1.0, 0.0


def same_on_every_backend(name: str, vocabs: Sequence[int] = (7, 1030, 2500), rows: int = 96) -> list[Agreement]:
    """Compares acceptance and thresholds of each backend with the reference, with keyed randomness."""
    rule = get_rule(name)
    found = []
    for backend in backends():
        compared = different = 0
        largest = math.nan
        for at, vocab in enumerate(vocabs):
            for layout in layouts(rule):
                draft, dists, rng = batch_for(rule, layout, vocab, rows, seed=100 * at + 7)
                with use_backend("reference"):
                    want = _verify(rule, draft, dists, rng)
                    expected_parts = _comparable_thresholds(rule, draft, dists)
                try:
                    with use_backend(backend):
                        got = _verify(rule, draft, dists, rng)
                        parts = _comparable_thresholds(rule, draft, dists)
                except UnsupportedError:
                    continue
                compared += rows
                different += int(_different(want, got).sum())
                for expected, other in zip(expected_parts, parts):
                    both_nan = expected.isnan() & other.isnan()
                    error = torch.where(both_nan, 0.0, expected - other).abs().nan_to_num(nan=torch.inf)
                    largest = max(0.0 if math.isnan(largest) else largest, float(error.max()))
        if compared:
            found.append(Agreement(name, f"{backend} = reference", compared, different, largest, 2e-5))
    return found


def _comparable_thresholds(rule: Rule, draft: Draft, dists: TokenDistributions) -> list[Tensor]:
    """Thresholds and normalised residual weights; empty for rules without thresholds."""
    if not has_thresholds(rule):
        return []
    threshold, residual = rule.thresholds(draft, tree_plan(draft.parents, draft.offsets), dists)
    # if a node is certainly accepted, its residual is never used
    total = residual.double().sum(1, keepdim=True)
    return [threshold.double(), torch.where(total > 1e-4, residual.double() / total, 0.0)]


def same_anywhere(name: str, rows: int = 48, vocab: int = 900) -> list[Agreement]:
    """Compares every row of a ragged batch with the row alone, and with the batch in another order."""
    rule = get_rule(name)
    sizes = [layout for layout in layouts(rule) if not takes_trees(rule) or not layout.is_chain][:1]
    whole, every, rng = batch_for(rule, sizes[0], vocab, rows, seed=5)
    ragged = [1 + row % len(sizes[0].parents) for row in range(rows)]  # some rows have no draft tokens
    draft, dists = _take(whole, every, list(range(rows)), ragged)
    acceptance = _verify(rule, draft, dists, rng)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(3))
    compared_alone = wrong_alone = 0
    many = _take(draft, dists, order.tolist())
    other = _verify(rule, *many, Rng(rng.seeds[order], rng.positions[order]))
    wrong_order = int(_unequal(acceptance, draft, order.tolist(), other, many[0]).sum())
    for row in range(0, rows, 4):
        one = _take(draft, dists, [row])
        alone = _verify(rule, *one, Rng(rng.seeds[row : row + 1], rng.positions[row : row + 1]))
        wrong_alone += int(_unequal(acceptance, draft, [row], alone, one[0]).sum())
        compared_alone += 1
    return [
        Agreement(name, "a row alone = the row in a batch", compared_alone, wrong_alone),
        Agreement(name, "any order of rows", rows, wrong_order),
    ]


def _take(
    draft: Draft, dists: TokenDistributions, rows: list[int], sizes: list[int] | None = None
) -> tuple[Draft, TokenDistributions]:
    """Selects rows of a batch in the given order. `sizes` limits the number of nodes of each row."""
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
    """Marks the rows `rows` of `a` that differ from those of `b`, bool [len(rows)]. Paths count from their roots."""
    index = torch.tensor(rows)
    starts_a, starts_b = of_a.offsets[:-1][index, None], of_b.offsets[:-1, None]
    path_a = torch.where(a.path[index] >= 0, a.path[index] - starts_a, -1)
    path_b = torch.where(b.path >= 0, b.path - starts_b, -1)
    return (path_a != path_b).any(1) | (a.next_token[index] != b.next_token)


def same_when_greedy(name: str, vocab: int = 50, rows: int = 64) -> Agreement:
    """Compares a rule at temperature 0 with a plain loop that follows the arg-max from the root."""
    rule = get_rule(name)
    trees = takes_trees(rule)
    parents = DEEP if trees else CHAIN
    source = torch.Generator().manual_seed(11)
    size = len(parents)
    logits = torch.randn(rows * size, vocab, generator=source)
    best = logits.argmax(1).view(rows, size)
    tokens = torch.randint(vocab, (rows, size), generator=source)
    for node, parent in enumerate(parents):
        if parent >= 0:  # half of the nodes have the arg-max token
            right = torch.rand(rows, generator=source) < 0.5
            tokens[right, node] = best[right, parent]
    shape = Draft.trees(list(range(rows)), [(row, parents) for row in tokens.tolist()])
    draft = replace(shape, is_chain=not trees)
    dists = dists_of_logits(logits, 0.0)
    rng = Rng(torch.arange(rows), torch.full((rows,), 5, dtype=torch.int32))
    acceptance = _verify(rule, draft, dists, rng)
    wrong = 0
    for row in range(rows):
        path, node = [0], 0
        while True:
            matching = [c for c in range(size) if parents[c] == node and tokens[row, c] == best[row, node]]
            if not matching:
                break
            node = matching[0]
            path.append(node)
        got = [at - row * size for at in acceptance.path[row].tolist() if at >= 0]
        same = [int(tokens[row, at]) for at in got[1:]] == [int(tokens[row, at]) for at in path[1:]]
        wrong += not (same and int(acceptance.next_token[row]) == int(best[row, node]))
    return Agreement(name, "temperature 0 = the arg-max path", rows, wrong)


def run_agreement(names: Sequence[str]) -> list[Agreement]:
    """Runs all comparisons of this module for every lossless rule of `names`."""
    found: list[Agreement] = []
    for name in names:
        if get_rule(name).lossless:
            found += same_on_every_backend(name)
            found += same_anywhere(name)
            found.append(same_when_greedy(name))
    return found
