"""Accepted tokens per step of every rule with its best proposals, on the same distributions and the same number of
nodes.

Chains and trees are compared among themselves: of six nodes a chain may have six accepted, a tree of two levels two.
The distributions are those of real places; inside one step every node has the same two (`lab.simulate`). So the table
ranks rules and proposals, and is no forecast of a text's tokens per pass. Tests: tests/lab/test_run.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch

from specdec_fast.lab.exact_distributions import has_a_dist, takes_trees
from specdec_fast.lab.simulator import Layout, Simulator
from specdec_fast.lab.statistics import Z_999
from specdec_fast.lab.text_positions import Place
from specdec_fast.rules import get_rule

LONG_CHAIN = (-1, 0, 1, 2, 3, 4, 5)
WIDE_TREE = (-1, 0, 0, 1, 1, 2, 2)
"""Six nodes each: a chain, and two levels of two siblings."""
_MOST_NUMBERS = 1 << 24  # of logits that a chunk may copy


@dataclass(frozen=True, slots=True)
class Acceptances:
    """mean: accepted draft tokens per step over all places; half: half-width of its 99.9% interval; depth: the most
    that a step can accept.
    """

    rule: str
    proposals: str
    nodes: int
    depth: int
    mean: float
    half: float
    steps: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def contenders(names: Sequence[str]) -> list[tuple[str, str, Layout]]:
    """(rule, words, layout) of everything that is compared."""
    found = []
    for name in names:
        rule = get_rule(name)
        if not has_a_dist(rule):
            continue
        if rule.replays:
            found.append((name, "coupled chain", Layout(LONG_CHAIN, "coupled")))
            found.append((name, "coupled tree", Layout(WIDE_TREE, "coupled")))
        elif takes_trees(rule):
            found.append((name, "chain", Layout(LONG_CHAIN, "sampled")))
            found.append((name, "tree, independent", Layout(WIDE_TREE, "iid")))
            found.append((name, "tree, without replacement", Layout(WIDE_TREE, "without")))
            found.append((name, "tree, hybrid", Layout(WIDE_TREE, "hybrid")))
        else:
            found.append((name, "chain", Layout(LONG_CHAIN, "sampled")))
    return found


@torch.inference_mode()
def compare_rules(
    names: Sequence[str],
    places: Sequence[Place],
    steps: int = 4000,
    seed: int = 0,
    tick: Callable[[], None] = lambda: None,
) -> list[Acceptances]:
    """Mean accepted tokens of each contender, `steps` steps at every place; chains first, the most accepted first."""
    rows = []
    for name, words, layout in contenders(names):
        means, variances = [], []
        for at, place in enumerate(places):
            try:
                simulator = Simulator(get_rule(name), place.p, place.q, layout)
            except ValueError:  # too few tokens to draw siblings from
                continue
            accepted = _accepted(simulator, steps, len(place.tokens) - 1, seed + (at << 32))
            means.append(accepted.mean())
            variances.append(accepted.var() / steps)
        if means:
            half = Z_999 * float(np.sqrt(np.sum(variances))) / len(means)
            nodes, total = len(layout.parents) - 1, steps * len(means)
            rows.append(Acceptances(name, words, nodes, max(layout.depth), float(np.mean(means)), half, total))
        tick()
    return sorted(rows, key=lambda row: (-row.depth, -row.mean))


def by_shape(rows: Sequence[Acceptances]) -> list[tuple[str, list[Acceptances]]]:
    """(title, rows) of the chains, then of the trees, each from the most accepted down."""
    found = []
    for (depth, nodes), own in groupby(rows, lambda row: (row.depth, row.nodes)):
        what = f"chains of {nodes} tokens" if depth == nodes else f"trees of {nodes} tokens on {depth} levels"
        found.append((f"{what}, at most {depth} accepted", list(own)))
    return found


def _accepted(simulator: Simulator, steps: int, root: int, seed: int) -> np.ndarray:
    chunk = max(1, min(steps, _MOST_NUMBERS // simulator.vocab))
    parts = []
    for start in range(0, steps, chunk):
        seeds = torch.arange(start, min(start + chunk, steps)) + seed
        positions = torch.full((len(seeds),), root, dtype=torch.int32)
        parts.append(simulator.step(seeds, positions)[1])
    return np.concatenate(parts).astype(np.float64)
