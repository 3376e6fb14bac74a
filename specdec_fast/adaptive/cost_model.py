"""What drafts cost and what they bring, by what became of earlier ones: seconds by a number of nodes, accepted tokens
by a budget. Knows committed data and times only. Tests: tests/adaptive/test_cost_model.py.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Outcome:
    """What became of one row's draft: nodes that may be accepted (`drafted`, root not counted), their depth, depths
    reached by the walk (`tested`), tokens accepted; nodes: all that were scored for it, score-only nodes included.
    """

    drafted: int
    depth: int
    tested: int
    accepted: int
    nodes: int


@dataclass(slots=True)
class Times:
    """Measured seconds by a number of nodes; between two measured numbers, a straight line.

    Numbers are measured at different times, and a machine that others use is faster at one time than at another:
    `pace`, which follows quickly, is what all numbers have in common, so that they are compared as of the same time.
    follow: how quickly, per measurement.
    """

    follow: float = 0.1

    seconds: dict[int, float] = field(default_factory=dict)  # at pace 1
    counts: dict[int, int] = field(default_factory=dict)
    keys: list[int] = field(default_factory=list)
    pace: float = 1.0

    def add(self, number: int, seconds: float) -> None:
        key = number if number <= 32 else number // 8 * 8
        count = self.counts.get(key, 0)
        if not count:
            self.keys.insert(bisect_left(self.keys, key), key)
            self.seconds[key] = seconds / self.pace
        else:  # a pause of the machine is no measurement, and a first one that was is soon forgotten
            now, known = seconds / self.pace, self.seconds[key]
            if count < 4:
                known = min(known, 1.5 * now)
            found = min(max(now, 0.8 * known), 1.25 * known)
            self.seconds[key] = known + max(1 / (count + 1), 0.05) * (found - known)
            if count >= 4 and known > 0:
                self.pace *= 1 + self.follow * (found / known - 1)
        self.counts[key] = count + 1

    def at(self, number: int) -> float:
        """Seconds for a number; beyond what was measured the last slope goes on, never downwards."""
        return self._steady(number) * self.pace

    def table(self, last: int) -> list[float]:
        """Seconds for every number from 0 to `last`: `at` of each."""
        found: list[float] = []
        knots = [0, *(key for key in self.keys if 0 < key < last), last]
        values = [self.at(knot) for knot in knots]
        for low, high, first, then in zip(knots, knots[1:], values, values[1:]):
            slope = (then - first) / max(high - low, 1)
            found += [first + slope * place for place in range(high - low)]
        return [*found, values[-1]]

    def _steady(self, number: int) -> float:
        keys, seconds = self.keys, self.seconds
        if not keys:
            return 0.0
        if number in seconds:
            return seconds[number]
        if len(keys) == 1:
            return seconds[keys[0]]
        right = min(max(bisect_left(keys, number), 1), len(keys) - 1)
        low, high = keys[right - 1], keys[right]
        slope = (seconds[high] - seconds[low]) / (high - low)
        if number > high:
            return seconds[high] + max(slope, 0.0) * (number - high)
        if number < low:
            return max(seconds[low] - max(slope, 0.0) * (low - number), 0.0)
        return seconds[low] + slope * (number - low)


@dataclass(slots=True)
class _Rate:
    """How often something came when it was tried; recent tries count more."""

    tried: float = 0.0
    came: float = 0.0

    def fade(self, forget: float) -> None:
        self.tried *= forget
        self.came *= forget

    def add(self, forget: float, came: bool) -> None:
        self.fade(forget)
        self.tried += 1
        self.came += came

    def of(self, prior: float, weight: float) -> float:
        return (self.came + weight * prior) / (self.tried + weight)


@dataclass(slots=True)
class _Rates:
    """How often there was a draft when one was asked for, how often there were nodes to score, and the acceptance rate
    at each depth, given that the walk got there. What was known of depths that are no longer drafted is forgotten
    too: bad luck there is not believed for ever.
    """

    forget: float
    answers: _Rate = field(default_factory=_Rate)
    scored: _Rate = field(default_factory=_Rate)
    depths: list[_Rate] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        self.answers.add(self.forget, outcome.drafted > 0)
        self.scored.add(self.forget, outcome.nodes > 0)
        if not outcome.drafted:
            return
        while len(self.depths) < outcome.tested:
            self.depths.append(_Rate())
        for depth in range(outcome.tested):
            self.depths[depth].add(self.forget, depth < outcome.accepted)
        for rate in self.depths[outcome.depth :]:
            rate.fade(self.forget)

    def rate(self, depth: int, prior: float, weight: float) -> float:
        return self.depths[depth].of(prior, weight) if depth < len(self.depths) else prior


class CostModel:
    """What a drafter's budgets bring in accepted tokens, by what became of its drafts: per row, the product of its
    acceptance rates down to each depth (few data lean on those of all rows); a budget of n nodes reaches the depth that
    drafts of n nodes had. first_rate: of a depth that was never tested.
    """

    def __init__(self, first_rate: float = 0.7) -> None:
        self.first_rate = first_rate
        self._all = _Rates(0.99)
        self._rows: dict[int, _Rates] = {}
        self._reached = Times(follow=0.0)  # depth of drafts by their nodes
        self._gains: dict[int, list[float]] = {}  # answers that are still good, by row

    def __contains__(self, row: int) -> bool:
        """Whether a row was heard of."""
        return row in self._rows

    def observe(self, rows: Sequence[int], asked: Sequence[int], outcomes: Sequence[Outcome]) -> None:
        """What became of a step's drafts. asked: nodes that each row was allowed."""
        for row, wanted, outcome in zip(rows, asked, outcomes):
            mine = self._rows.setdefault(row, _Rates(0.95))
            if not wanted:
                continue
            mine.add(outcome)
            self._all.add(outcome)
            if outcome.drafted:
                self._reached.add(outcome.drafted, outcome.depth)
                self._gains.clear()

    def release(self, rows: Sequence[int]) -> None:
        """Rows have left."""
        for row in rows:
            self._rows.pop(row, None)
            self._gains.pop(row, None)

    def answered(self, row: int) -> float:
        """The chance that there is a draft for a row if one is asked for."""
        mine, usual = self._rows.get(row), self._all.answers.of(1.0, 2.0)
        return usual if mine is None else mine.answers.of(usual, 8.0)

    def scored(self, row: int) -> float:
        """The chance that a pass has nodes for a row if a draft is asked for: score-only nodes are there where
        drafts are not.
        """
        mine, usual = self._rows.get(row), self._all.scored.of(1.0, 2.0)
        return usual if mine is None else mine.scored.of(usual, 8.0)

    def expected(self, row: int, most: int) -> list[float]:
        """Accepted tokens to be expected of drafts of 0..most nodes of a row, where there are such."""
        gains = self._gains.get(row, [])
        if len(gains) <= most:
            gains = self._gains[row] = self._expected(self._rows.get(row), most)
        return gains[: most + 1]

    def _expected(self, mine: _Rates | None, most: int) -> list[float]:
        reached = self._reached.table(most) if self._reached.keys else [float(nodes) for nodes in range(most + 1)]
        depths, below = [], 0.0
        for nodes, depth in enumerate(reached):
            below = max(min(max(depth, below), nodes), min(1.0, nodes))
            depths.append(below)
        rate, survival, gains = self.first_rate, 1.0, [0.0]  # of drafts of every depth
        for level in range(int(below) + 1):
            rate = self._all.rate(level, rate, 2.0)
            survival *= rate if mine is None else mine.rate(level, rate, 8.0)
            gains.append(gains[-1] + survival)
        return [gains[int(deep)] + (deep - int(deep)) * (gains[int(deep) + 1] - gains[int(deep)]) for deep in depths]
