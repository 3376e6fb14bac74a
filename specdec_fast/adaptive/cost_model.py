"""Cost model of drafts: measured seconds by number of nodes, and expected accepted tokens by budget.

It reads committed data and times only. Tests: tests/adaptive/test_cost_model.py.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class DraftOutcome:
    """The outcome of one row's draft in a step.

    Attributes:
        num_drafted: Nodes that may be accepted, root not counted.
        depth: Depth of these nodes.
        depths_tested: Depths that the rule tested.
        num_accepted: Accepted draft tokens.
        num_scored: All nodes that were scored for the draft, score-only nodes included.
    """

    num_drafted: int
    depth: int
    depths_tested: int
    num_accepted: int
    num_scored: int


@dataclass(slots=True)
class TimeTable:
    """Measured seconds by number of nodes, interpolated linearly.

    Numbers are measured at different times, and a shared machine is faster at one time than at another. `slowdown`
    follows the machine's speed quickly and applies to all numbers, so measurements of different times can be compared.

    With a `prior`, measurements are stored relative to it. Numbers that were never measured then have the prior's
    seconds, corrected by the nearest measurements.

    Attributes:
        slowdown_rate: Weight of each measurement in `slowdown`.
        seconds: Seconds by number of nodes, at slowdown 1, relative to `prior` if there is one.
        counts: Measurements by number of nodes.
        keys: Measured numbers, sorted.
        slowdown: Current seconds relative to `seconds`.
        prior: Earlier measurements under other conditions, or None.
    """

    slowdown_rate: float = 0.1
    seconds: dict[int, float] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    keys: list[int] = field(default_factory=list)
    slowdown: float = 1.0
    prior: TimeTable | None = None

    def add(self, number: int, seconds: float) -> None:
        """Adds a measurement. Numbers above 32 are rounded down to multiples of 8."""
        seconds /= self._expected(number)
        key = number if number <= 32 else number // 8 * 8
        count = self.counts.get(key, 0)
        if not count:
            self.keys.insert(bisect_left(self.keys, key), key)
            self.seconds[key] = seconds / self.slowdown
        else:  # outliers are clipped, since the machine may pause; an early outlier is soon overruled
            scaled, known = seconds / self.slowdown, self.seconds[key]
            if count < 4:
                known = min(known, 1.5 * scaled)
            clipped = min(max(scaled, 0.8 * known), 1.25 * known)
            self.seconds[key] = known + max(1 / (count + 1), 0.05) * (clipped - known)
            if count >= 4 and known > 0:
                self.slowdown *= 1 + self.slowdown_rate * (clipped / known - 1)
        self.counts[key] = count + 1

    def seconds_at(self, number: int) -> float:
        """Returns the seconds for a number of nodes.

        Beyond the measured numbers the last slope continues, never downwards.
        """
        return self._expected(number) * self._interpolate(number) * self.slowdown

    def _expected(self, number: int) -> float:
        """Seconds that the prior expects; 1 without a prior."""
        return 1.0 if self.prior is None else max(self.prior.seconds_at(number), 1e-9)

    def table(self, last: int) -> list[float]:
        """Returns `seconds_at` for every number from 0 to `last`."""
        found: list[float] = []
        measured = self.keys if self.prior is None else sorted({*self.keys, *self.prior.keys})
        knots = [0, *(key for key in measured if 0 < key < last), last]
        values = [self.seconds_at(knot) for knot in knots]
        for low, high, first, then in zip(knots, knots[1:], values, values[1:]):
            slope = (then - first) / max(high - low, 1)
            found += [first + slope * place for place in range(high - low)]
        return [*found, values[-1]]

    def _interpolate(self, number: int) -> float:
        """Seconds for a number at slowdown 1."""
        keys, seconds = self.keys, self.seconds
        if not keys:
            return 0.0 if self.prior is None else 1.0
        if number in seconds:
            return seconds[number]
        if len(keys) == 1:
            return seconds[keys[0]]
        if self.prior is not None:  # the prior knows the slope beyond the measured numbers
            number = min(max(number, keys[0]), keys[-1])
            if number in seconds:
                return seconds[number]
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
    """A success rate in which recent trials count more."""

    trials: float = 0.0
    successes: float = 0.0

    def decay(self, factor: float) -> None:
        """Reduces the weight of earlier trials."""
        self.trials *= factor
        self.successes *= factor

    def add(self, factor: float, success: bool) -> None:
        """Adds a trial."""
        self.decay(factor)
        self.trials += 1
        self.successes += success

    def estimate(self, prior: float, weight: float) -> float:
        """Success rate, with a prior that counts as `weight` trials."""
        return (self.successes + weight * prior) / (self.trials + weight)


@dataclass(slots=True)
class _Rates:
    """Success rates of drafts.

    Attributes:
        decay: Factor on the weight of earlier trials.
        drafts: A requested draft had nodes that may be accepted.
        passes: A requested draft had nodes to score.
        accepted: Acceptance at each depth, given that the depth was tested. Depths that are no longer drafted decay
            too, so early rejections there do not count forever.
    """

    decay: float
    drafts: _Rate = field(default_factory=_Rate)
    passes: _Rate = field(default_factory=_Rate)
    accepted: list[_Rate] = field(default_factory=list)

    def add(self, outcome: DraftOutcome) -> None:
        self.drafts.add(self.decay, outcome.num_drafted > 0)
        self.passes.add(self.decay, outcome.num_scored > 0)
        if not outcome.num_drafted:
            return
        while len(self.accepted) < outcome.depths_tested:
            self.accepted.append(_Rate())
        for depth in range(outcome.depths_tested):
            self.accepted[depth].add(self.decay, depth < outcome.num_accepted)
        for rate in self.accepted[outcome.depth :]:
            rate.decay(self.decay)

    def rate(self, depth: int, prior: float, weight: float) -> float:
        """Acceptance rate of a depth."""
        return self.accepted[depth].estimate(prior, weight) if depth < len(self.accepted) else prior


class CostModel:
    """Estimates the accepted tokens of a drafter's budgets from the outcomes of its drafts.

    A row's estimate for a depth is the product of its acceptance rates down to that depth. Rows with few data lean on
    the rates of all rows. A budget of n nodes reaches the depth that drafts of n nodes had.

    Args:
        first_rate: Acceptance rate of a depth that was never tested.
    """

    def __init__(self, first_rate: float = 0.7) -> None:
        self.first_rate = first_rate
        self._all = _Rates(0.99)
        self._rows: dict[int, _Rates] = {}
        self._depth_by_nodes = TimeTable(slowdown_rate=0.0)  # holds depths of drafts, not seconds
        self._gains: dict[int, list[float]] = {}  # by row, valid until the next draft

    def __contains__(self, row: int) -> bool:
        """Returns whether a row was observed."""
        return row in self._rows

    def observe(self, rows: Sequence[int], budgets: Sequence[int], outcomes: Sequence[DraftOutcome]) -> None:
        """Adds the outcomes of a step.

        Args:
            rows: Rows of the step.
            budgets: Budget of each row. Rows with budget 0 count as observed only.
            outcomes: Outcome of each row.
        """
        for row, budget, outcome in zip(rows, budgets, outcomes):
            own = self._rows.setdefault(row, _Rates(0.95))
            if not budget:
                continue
            own.add(outcome)
            self._all.add(outcome)
            if outcome.num_drafted:
                self._depth_by_nodes.add(outcome.num_drafted, outcome.depth)
                self._gains.clear()

    def release(self, rows: Sequence[int]) -> None:
        """Removes rows."""
        for row in rows:
            self._rows.pop(row, None)
            self._gains.pop(row, None)

    def draft_probability(self, row: int) -> float:
        """Returns the probability that a requested draft of a row has nodes that may be accepted."""
        own, usual = self._rows.get(row), self._all.drafts.estimate(1.0, 2.0)
        return usual if own is None else own.drafts.estimate(usual, 8.0)

    def scoring_probability(self, row: int) -> float:
        """Returns the probability that a requested draft of a row adds nodes to the target's pass.

        Drafts may consist of score-only nodes.
        """
        own, usual = self._rows.get(row), self._all.passes.estimate(1.0, 2.0)
        return usual if own is None else own.passes.estimate(usual, 8.0)

    def accepted_by_depth(self, row: int, depth: int) -> list[float]:
        """Returns the expected accepted tokens of a draft by its depth, 0 to `depth`, given that there is a draft."""
        own, rate, survival, gains = self._rows.get(row), self.first_rate, 1.0, [0.0]
        for level in range(depth):
            rate = self._all.rate(level, rate, 2.0)
            survival *= rate if own is None else own.rate(level, rate, 8.0)
            gains.append(gains[-1] + survival)
        return gains

    def expected_accepted(self, row: int, max_nodes: int) -> list[float]:
        """Returns the expected accepted tokens of drafts with 0..max_nodes nodes, given that there is a draft."""
        gains = self._gains.get(row, [])
        if len(gains) <= max_nodes:
            gains = self._gains[row] = self._compute_gains(row, max_nodes)
        return gains[: max_nodes + 1]

    def _compute_gains(self, row: int, max_nodes: int) -> list[float]:
        """Expected accepted tokens by number of nodes."""
        reached = (
            self._depth_by_nodes.table(max_nodes)
            if self._depth_by_nodes.keys
            else [float(nodes) for nodes in range(max_nodes + 1)]
        )
        depths, below = [], 0.0
        for nodes, depth in enumerate(reached):
            below = max(min(max(depth, below), nodes), min(1.0, nodes))
            depths.append(below)
        gains = self.accepted_by_depth(row, int(below) + 1)
        return [
            gains[int(depth)] + (depth - int(depth)) * (gains[int(depth) + 1] - gains[int(depth)]) for depth in depths
        ]
