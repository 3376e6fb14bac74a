"""Cost model of drafts: measured seconds by number of nodes, expected nodes and accepted tokens by budget.

It reads committed data and times only. Tests: tests/adaptive/test_cost_model.py.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median


@dataclass(slots=True)
class DraftOutcome:
    """The outcome of one row's draft in a step.

    Attributes:
        num_drafted: Nodes that may be accepted, root not counted.
        num_accepted: Accepted draft tokens.
        num_scored: All nodes that were scored for the draft, score-only nodes included.
        path: Numbers of the accepted nodes among those that may be accepted, in the drafter's order, from 1. None
            stands for 1, 2, ..., `num_accepted`, as in a chain.
    """

    num_drafted: int
    num_accepted: int
    num_scored: int
    path: Sequence[int] | None = None


@dataclass(slots=True)
class TimeTable:
    """Measured seconds by number of nodes, interpolated linearly.

    Numbers are measured at different times, and a shared machine is faster at one time than at another. `slowdown`
    follows the machine's speed quickly and applies to all numbers, so measurements of different times can be compared.

    With a `prior`, measurements are stored relative to it. Numbers that were never measured have the prior's seconds,
    corrected by the nearest measurements.

    Attributes:
        slowdown_rate: Weight of each measurement in `slowdown`, without a prior.
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
    _latest: list[float] = field(default_factory=list)  # latest measurements relative to `prior` and `seconds`

    def add(self, number: int, seconds: float) -> None:
        """Adds a measurement. Numbers above 32 are rounded down to multiples of 8."""
        seconds /= self._expected(number)
        key = number if number <= 32 else number // 8 * 8
        count = self.counts.get(key, 0)
        if not count:
            self.seconds[key] = seconds / self.slowdown if self.prior is None else self._interpolate(key)
            self.keys.insert(bisect_left(self.keys, key), key)
        if self.prior is not None:
            self._correct(key, count, seconds)
        elif count:  # outliers are clipped, since the machine may pause; an early outlier is soon overruled
            scaled, known = seconds / self.slowdown, self.seconds[key]
            if count < 4:
                known = min(known, 1.5 * scaled)
            clipped = min(max(scaled, 0.8 * known), 1.25 * known)
            self.seconds[key] = known + max(1 / (count + 1), 0.05) * (clipped - known)
            if count >= 4 and known > 0:
                self.slowdown *= 1 + self.slowdown_rate * (clipped / known - 1)
        self.counts[key] = count + 1

    def _correct(self, key: int, count: int, factor: float) -> None:
        """Adds a measurement beside the prior: `factor` times its seconds.

        The machine's speed is the median of the latest measurements, so one slow pass says nothing of other numbers.
        What was known of a number counts as one measurement of it.
        """
        known = self.seconds[key]
        if self._latest:
            clipped = min(max(factor / self.slowdown, 0.8 * known), 1.25 * known)
            self.seconds[key] = known + max(1 / (count + 2), 0.15) * (clipped - known)
        self._latest = [*self._latest[1 - _LATEST :], factor / known]
        self.slowdown = median(self._latest)

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
class _Recent:
    """Sums over past drafts, in which recent ones count more.

    Attributes:
        decay: Factor on the weight of earlier drafts.
        weight: Weight of the latest draft. It grows, so that earlier weights need no change.
    """

    decay: float
    weight: float = 1.0

    def _advance(self, last: int, *columns: list[float]) -> None:
        """Begins the next draft, in columns that have place `last` from now on."""
        self.weight /= self.decay
        scale, self.weight = (self.weight, 1.0) if self.weight > _LARGEST_WEIGHT else (1.0, self.weight)
        for column in columns:
            column += [0.0] * (last + 1 - len(column))
            if scale > 1:
                column[:] = [each / scale for each in column]


@dataclass(slots=True)
class Lengths(_Recent):
    """Lengths of past drafts. Some were cut, so only their least length is known.

    Attributes:
        ended: Weight of the lengths that ended by themselves, by length.
        cut: Weight of the lengths that were cut, by length.

    Source:
        Kaplan and Meier 1958, with priors and decay.
    """

    ended: list[float] = field(default_factory=list)
    cut: list[float] = field(default_factory=list)

    def add(self, length: int, cut: bool) -> None:
        """Adds a length. `cut`: it might have been larger."""
        self._advance(length, self.ended, self.cut)
        (self.cut if cut else self.ended)[length] += self.weight

    def trials(self, most: int) -> list[tuple[float, float]]:
        """Counts how often a length went on, and how often it could have.

        Args:
            most: Number of lengths.

        Returns:
            For every length n from 0 to most - 1: number of lengths above n, and number of those above n or ended at n.
        """
        found, above = [(0.0, 0.0)] * most, 0.0
        for length in range(len(self.cut) - 1, -1, -1):
            if length < most:
                found[length] = above / self.weight, (above + self.ended[length]) / self.weight
            above += self.ended[length] + self.cut[length]
        return found


@dataclass(slots=True)
class Nodes(_Recent):
    """How often each node of past drafts was accepted.

    Attributes:
        budgets: Weight of the drafts, by budget.
        hits: Weight of the drafts in which a node was accepted, by node.
    """

    budgets: list[float] = field(default_factory=list)
    hits: list[float] = field(default_factory=list)

    def add(self, budget: int, path: Iterable[int]) -> None:
        """Adds a draft. Nodes that it could have had and did not have were not accepted."""
        self._advance(budget, self.budgets, self.hits)
        self.budgets[budget] += self.weight
        for node in path:
            if node <= budget:
                self.hits[node] += self.weight

    def trials(self, most: int) -> list[tuple[float, float]]:
        """Returns for nodes 1, 2, ..., `most` how often they were accepted, and how often they could have been."""
        found, trials = [(0.0, 0.0)] * most, 0.0
        for node in range(len(self.budgets) - 1, 0, -1):
            trials += self.budgets[node]
            if node <= most:
                found[node - 1] = self.hits[node] / self.weight, trials / self.weight
        return found


def survival(parts: Sequence[Lengths], most: int, rate: float) -> list[float]:
    """Estimates how probable lengths are.

    Args:
        parts: Lengths of all rows, and those of one row, if it has any. Few lengths of a row lean on those of all rows.
        most: Largest length.
        rate: Prior of the rate at which lengths go on from 0 and from 1. At each further length, the rate of the one
            before is the prior. Length 0 says little of others: there may have been no draft.

    Returns:
        Probabilities that a length is at least 1, 2, ..., `most`.
    """
    found, product, first = [], 1.0, rate
    for length, counts in enumerate(zip(*(part.trials(most) for part in parts))):
        went_on, could = counts[0]
        own = rate = (went_on + _PRIOR_WEIGHT * (rate if length > 1 else first)) / (could + _PRIOR_WEIGHT)
        for went_on, could in counts[1:]:
            own = (went_on + _ROW_PRIOR_WEIGHT * rate) / (could + _ROW_PRIOR_WEIGHT)
        product *= own
        found.append(product)
    return found


class CostModel:
    """Estimates what a drafter's budgets add to the target's pass, and the tokens that they bring.

    Both follow from the outcomes of its drafts: how many nodes they had, and which were accepted. A draft under a
    smaller budget is taken as the first nodes of the same draft. Drafters that reorder their nodes (`forest`) keep that
    only roughly. A chain that fills its budget and is accepted whole might have gone on under a larger one.

    Args:
        first_rate: Acceptance rate of a token that was never tested.
    """

    def __init__(self, first_rate: float = 0.7) -> None:
        self.first_rate = first_rate
        self._all = _Drafts.with_decay(0.99)
        self._rows: dict[int, _Drafts] = {}
        self._branch = False  # a draft had branches
        self._known: dict[tuple[int, int], tuple[list[float], list[float]]] = {}  # estimates, until the next draft

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
            if row not in self._rows:
                self._rows[row] = _Drafts.with_decay(0.95)
            if budget:
                self._branch = self._branch or outcome.path is not None
                self._all.add(budget, outcome)
                self._rows[row].add(budget, outcome)
                self._known.clear()

    def release(self, rows: Sequence[int]) -> None:
        """Removes rows."""
        for row in rows:
            self._rows.pop(row, None)
        self._known.clear()

    def size_probabilities(self, row: int, max_nodes: int) -> list[float]:
        """Returns the probability that a draft has at least 1, 2, ..., `max_nodes` nodes to score."""
        return self._estimate(row, max_nodes)[0]

    def node_gains(self, row: int, max_nodes: int) -> list[float]:
        """Returns the expected accepted tokens that node 1, 2, ..., `max_nodes` of a draft adds, never increasing.

        A node that adds little may be followed by one that adds more. Both then have the mean.
        """
        return self._estimate(row, max_nodes)[1]

    def _estimate(self, row: int, max_nodes: int) -> tuple[list[float], list[float]]:
        """Sizes and gains of a row's drafts."""
        key = row, max_nodes
        if key not in self._known:
            parts = [self._all, self._rows[row]] if row in self._rows else [self._all]
            sizes = survival([part.sizes for part in parts], max_nodes, 1.0)
            if self._branch:
                gains = never_increasing(self._tree_rates([part.nodes for part in parts], max_nodes))
            else:
                gains = survival([part.accepted for part in parts], max_nodes, self.first_rate)
            self._known[key] = sizes, gains
        return self._known[key]

    def _tree_rates(self, parts: Sequence[Nodes], most: int) -> list[float]:
        """How often each node is accepted, by all rows and by one."""
        before, last, rates = 0.0, self.first_rate, []
        for node, counts in enumerate(zip(*(part.trials(most) for part in parts)), start=1):
            # the prior is a chain in which all tokens are accepted at one rate; a sibling in between does not count
            prior = max(before, last) ** (node / (node - 1)) if node > 1 else self.first_rate
            hits, trials = counts[0]
            own = rate = (hits + _PRIOR_WEIGHT * prior) / (trials + _PRIOR_WEIGHT)
            for hits, trials in counts[1:]:
                own = (hits + _ROW_PRIOR_WEIGHT * rate) / (trials + _ROW_PRIOR_WEIGHT)
            before, last = last if node > 1 else 0.0, rate
            rates.append(own)
        return rates


@dataclass(slots=True)
class _Drafts:
    """What is known of the drafts of a row or of all rows.

    Attributes:
        sizes: Nodes to score, as far as the budget allowed.
        accepted: Accepted tokens, as far as the budget allowed. They tell of chains only.
        nodes: Accepted nodes.
    """

    sizes: Lengths
    accepted: Lengths
    nodes: Nodes

    @classmethod
    def with_decay(cls, decay: float) -> _Drafts:
        return cls(Lengths(decay), Lengths(decay), Nodes(decay))

    def add(self, budget: int, outcome: DraftOutcome) -> None:
        size, accepted = min(outcome.num_scored, budget), outcome.num_accepted
        self.sizes.add(size, cut=size == budget)
        self.accepted.add(accepted, cut=accepted >= budget)
        self.nodes.add(budget, range(1, accepted + 1) if outcome.path is None else outcome.path)


def never_increasing(gains: Sequence[float]) -> list[float]:
    """Replaces runs of gains by their mean, so that no gain exceeds the one before.

    Args:
        gains: Gains in order.

    Returns:
        The closest such gains. Their sum is the same.

    Source:
        Ayer et al. 1955 (pool adjacent violators).
    """
    pools: list[tuple[float, int]] = []  # mean, count
    for gain in gains:
        mean, count = gain, 1
        while pools and pools[-1][0] < mean:
            earlier, more = pools.pop()
            mean, count = (mean * count + earlier * more) / (count + more), count + more
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]


_LATEST = 9
"""Measurements beside a prior that tell the machine's speed."""

_LARGEST_WEIGHT = 1e12
"""Weight of a length above which all weights are scaled down."""

_PRIOR_WEIGHT, _ROW_PRIOR_WEIGHT = 2.0, 8.0
"""Trials that a prior counts as: the rate of the length before, for all rows; the rate of all rows, for one row."""
