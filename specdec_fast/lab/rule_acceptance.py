"""Accepted tokens per step of every rule with its best proposals, on equal distributions and numbers of nodes.

Chains are compared with chains and trees with trees: of six nodes, a chain can have six accepted, a tree of two levels
only two. The distributions are those of real positions. All nodes of a step have the same two (`simulator`). The table
therefore ranks rules and proposals, but does not predict tokens per pass of a text. Tests: tests/lab/test_run.py.
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
"""Two levels of two siblings. LONG_CHAIN also has six nodes."""
_MOST_NUMBERS = 1 << 24  # logits that a chunk may copy


@dataclass(frozen=True, slots=True)
class Acceptances:
    """Accepted tokens of one rule and kind of proposals.

    Attributes:
        rule: Name of the rule.
        proposals: The proposals, in words.
        nodes: Draft tokens per step.
        depth: Largest number of accepted tokens per step.
        mean: Mean accepted tokens per step over all positions.
        half: Half-width of its 99.9% interval.
        steps: Number of steps.
    """

    rule: str
    proposals: str
    nodes: int
    depth: int
    mean: float
    half: float
    steps: int

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields for JSON."""
        return asdict(self)


def contenders(names: Sequence[str]) -> list[tuple[str, str, Layout]]:
    """Returns (rule, proposals in words, layout) of all compared combinations."""
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
    """Measures mean accepted tokens of each contender.

    Args:
        names: Names of the rules.
        places: The positions.
        steps: Steps at every position.
        seed: Seed of the first position.
        tick: Called after each contender.

    Returns:
        Results, chains first, and then by falling mean.
    """
    rows = []
    for name, words, layout in contenders(names):
        means, variances = [], []
        for at, place in enumerate(places):
            try:
                simulator = Simulator(get_rule(name), place.p, place.q, layout)
            except ValueError:  # too few tokens for siblings
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
    """Returns (title, rows) for the chains, then for the trees. The order of rows is kept."""
    found = []
    for (depth, nodes), own in groupby(rows, lambda row: (row.depth, row.nodes)):
        what = f"chains of {nodes} tokens" if depth == nodes else f"trees of {nodes} tokens on {depth} levels"
        found.append((f"{what}, at most {depth} accepted", list(own)))
    return found


def _accepted(simulator: Simulator, steps: int, root: int, seed: int) -> np.ndarray:
    """Accepted tokens of every step, float64 [steps]."""
    chunk = max(1, min(steps, _MOST_NUMBERS // simulator.vocab))
    parts = []
    for start in range(0, steps, chunk):
        seeds = torch.arange(start, min(start + chunk, steps)) + seed
        positions = torch.full((len(seeds),), root, dtype=torch.int32)
        parts.append(simulator.step(seeds, positions)[1])
    return np.concatenate(parts).astype(np.float64)
