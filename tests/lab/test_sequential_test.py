"""The evidence of many runs: rarely large under the right distribution, however often one looks; growing under a
wrong one.
"""

from __future__ import annotations

import copy
from itertools import product
from math import comb
from pathlib import Path

import numpy as np
import pytest

from specdec_fast.lab.sequential_test import Ledger, assign_cells, log_evidence

DIST = np.array([0.4, 0.3, 0.2, 0.06, 0.04])


def test_the_evidence_of_all_outcomes_averages_to_one() -> None:
    """By enumeration: the mean of E over all counts of n draws is exactly 1, as of a martingale."""
    dist, n = np.array([0.5, 0.3, 0.2]), 6
    from math import factorial

    total = 0.0
    for a in range(n + 1):
        for b in range(n + 1 - a):
            counts = np.array([a, b, n - a - b])
            ways = factorial(n) / np.prod([factorial(int(c)) for c in counts])
            total += float(ways * np.prod(dist**counts)) * np.exp(log_evidence(counts, dist))
    assert total == pytest.approx(1.0, abs=1e-9)


def test_looking_after_every_batch_does_not_reject_the_right_distribution() -> None:
    source, reached = np.random.default_rng(0), 0
    for _ in range(150):
        counts, highest = np.zeros(5, dtype=np.int64), -np.inf
        for _ in range(25):
            counts += source.multinomial(500, DIST)
            highest = max(highest, log_evidence(counts, DIST))
        reached += highest >= np.log(20)
    assert reached <= 0.05 * 150 + 3 * (0.05 * 0.95 * 150) ** 0.5


def test_a_slightly_wrong_distribution_is_rejected_in_the_end() -> None:
    source, counts = np.random.default_rng(1), np.zeros(5, dtype=np.int64)
    wrong = DIST + np.array([0.01, -0.01, 0, 0, 0])
    nights = 0
    while nights < 200 and log_evidence(counts, DIST) < np.log(1000):
        counts += source.multinomial(2000, wrong)
        nights += 1
    assert 5 < nights < 150


def test_an_impossible_draw_is_infinite_evidence() -> None:
    assert log_evidence(np.array([5, 1]), np.array([1.0, 0.0])) == float("inf")
    assert log_evidence(np.array([5, 0]), np.array([1.0, 0.0])) == pytest.approx(0.0)


def test_few_bins_keeps_the_likeliest_apart() -> None:
    dist = np.random.default_rng(2).dirichlet(np.full(500, 0.3))
    cell = assign_cells(dist, 10)
    assert set(cell) == set(range(10)) and (np.bincount(cell)[:9] == 1).all()
    assert len(set(assign_cells(DIST, 64))) == 5


def test_a_ledger_accumulates_over_runs(tmp_path: Path) -> None:
    path, source = tmp_path / "ledger.json", np.random.default_rng(3)
    wrong = DIST + np.array([0.02, -0.02, 0, 0, 0])
    seen = np.zeros(5, dtype=np.int64)
    for night in range(12):
        ledger = Ledger.open(path)
        assert ledger.runs == night and ledger.next_seed == night
        counts = source.multinomial(1500, wrong)
        seen += counts
        ledger.add("here", counts, DIST)
        ledger.runs, ledger.next_seed = night + 1, night + 1
        ledger.save()
    (entry,) = Ledger.open(path).entries.values()
    assert entry["counts"] == seen.tolist() and entry["runs"] == 12
    assert Ledger.open(path).rejects
    single = Ledger()
    single.add("here", source.multinomial(1500, DIST), DIST)
    assert not single.rejects


def test_the_total_of_all_distributions_is_a_martingale_whenever_they_join() -> None:
    """By enumeration: given the first night, the mean of the second night's total is the first's; both begin at 1.

    The second distribution joins in the second night, a third one in the first, before it.
    """
    dists = {"a": 0.7, "b": 0.4, "c": 0.9}

    def nights(ledger: Ledger, names: str, draws: int) -> list[tuple[float, Ledger]]:
        """Chance and ledger of all that may be counted under these distributions."""
        found = []
        for seen in product(range(draws + 1), repeat=len(names)):
            chance, later = 1.0, copy.deepcopy(ledger)
            for name, count in zip(names, seen, strict=True):
                p = dists[name]
                chance *= comb(draws, count) * p**count * (1 - p) ** (draws - count)
                later.add(name, np.array([count, draws - count]), np.array([p, 1 - p]))
            found.append((chance, later))
        return found

    def mean(outcomes: list[tuple[float, Ledger]]) -> float:
        return sum(chance * np.exp(later.log_total()) for chance, later in outcomes)

    first = nights(Ledger(), "ac", 3)
    assert Ledger().log_total() == 0 and mean(first) == pytest.approx(1, abs=1e-7)
    spread = set()
    for _, ledger in first:
        second = nights(ledger, "acb", 2)
        assert {entry["runs"] for entry in second[0][1].entries.values()} == {1, 2}
        assert mean(second) == pytest.approx(np.exp(ledger.log_total()), abs=1e-7)
        spread.add(round(ledger.log_total(), 6))
    assert len(spread) == 16, "a total that never moves would be a martingale too"


def test_another_distribution_is_another_entry(tmp_path: Path) -> None:
    ledger = Ledger()
    ledger.add("here", np.array([4, 3, 2, 1, 0]), DIST)
    ledger.add("here", np.array([4, 3, 2, 1, 0]), DIST[::-1].copy())
    ledger.add("here", np.array([4, 3, 2, 1, 0]), DIST + 1e-9 - 1e-9)
    assert sorted(entry["runs"] for entry in ledger.entries.values()) == [1, 2]


def test_a_file_that_is_no_ledger_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    for text in ("{", "[1]", '{"runs": 1}'):
        path.write_text(text)
        with pytest.raises(ValueError, match="no ledger of the lab"):
            Ledger.open(path)


def test_a_ledger_of_an_earlier_version_goes_on(tmp_path: Path) -> None:
    """It stores the distribution of an entry as `law`."""
    path = tmp_path / "ledger.json"
    whole = Ledger(path)
    whole.add("place", [4, 3, 2, 1, 0], DIST)
    whole.save()
    path.write_text(path.read_text().replace('"dist"', '"law"'))
    earlier = Ledger.open(path)
    assert earlier.add("place", [4, 3, 2, 1, 0], DIST) == whole.add("place", [4, 3, 2, 1, 0], DIST)
