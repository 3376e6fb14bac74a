"""Pairwise test cases: every pair of values of every two factors occurs."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any


def pairwise(factors: Mapping[str, Sequence[Any]], seed: int = 0) -> list[dict[str, Any]]:
    """Greedy all-pairs: each new case takes the random row that covers most pairs not yet seen."""
    source = random.Random(seed)
    names = list(factors)
    missing = {
        (one, a, two, b)
        for one, two in combinations(names, 2)
        for a in range(len(factors[one]))
        for b in range(len(factors[two]))
    }

    def pairs(case: Mapping[str, int]) -> set[tuple[str, int, str, int]]:
        return {(one, case[one], two, case[two]) for one, two in combinations(names, 2)}

    cases = []
    while missing:
        one, a, two, b = min(missing)
        tries = []
        for _ in range(60):
            case = {name: source.randrange(len(factors[name])) for name in names} | {one: a, two: b}
            tries.append(case)
        best = max(tries, key=lambda case: len(missing & pairs(case)))
        missing -= pairs(best)
        cases.append({name: factors[name][index] for name, index in best.items()})
    return cases
