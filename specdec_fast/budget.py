"""How many draft nodes each row gets in a step: as many as were asked for (`fixed`), or as many as pay (`goodput`).

A policy sees committed data and the times of past steps, never a draft that is about to be verified: settling a budget
by what was drawn would change the law of the text under rules that use q. `surely_accepted` is for drafters that stop
early: it looks at the law of a token that is not drawn yet. `MovingThreshold` is for them too: it looks at what became
of earlier drafts. Tests: tests/test_budget.py.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heapreplace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one row's draft: nodes drafted (root not counted), their depth, depths reached by the walk
    (`tested`), tokens accepted.
    """

    drafted: int
    depth: int
    tested: int
    accepted: int


@runtime_checkable
class BudgetPolicy(Protocol):
    """Decides before a draft is made; hears afterwards what became of it and what it cost."""

    name: str

    def nodes(self, rows: Sequence[int], most: Sequence[int]) -> list[int]:
        """Draft nodes of each row for this step, at most `most`."""

    def observe(self, rows: Sequence[int], outcomes: Sequence[Outcome], propose: float, verify: float) -> None:
        """A step is over: seconds of the drafter's work, and of all from the target's pass to the committed tokens."""

    def release(self, rows: Sequence[int]) -> None:
        """Rows have left."""


class Fixed:
    """Every row gets what it asked for."""

    name = "fixed"

    def nodes(self, rows: Sequence[int], most: Sequence[int]) -> list[int]:
        return list(most)

    def observe(self, rows: Sequence[int], outcomes: Sequence[Outcome], propose: float, verify: float) -> None:
        pass

    def release(self, rows: Sequence[int]) -> None:
        pass


@dataclass(slots=True)
class _Times:
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
class _Rates:
    """Acceptance rate at each depth, given that the walk got there; recent steps count more. What was known of depths
    that are no longer drafted is forgotten too: bad luck there is not believed for ever.
    """

    forget: float
    tested: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        while len(self.tested) < outcome.tested:
            self.tested.append(0.0)
            self.accepted.append(0.0)
        for depth in range(outcome.tested):
            self.tested[depth] = self.tested[depth] * self.forget + 1
            self.accepted[depth] = self.accepted[depth] * self.forget + (depth < outcome.accepted)
        for depth in range(outcome.depth, len(self.tested)):
            self.tested[depth] *= self.forget
            self.accepted[depth] *= self.forget

    def rate(self, depth: int, prior: float, weight: float) -> float:
        if depth >= len(self.tested):
            return prior
        return (self.accepted[depth] + weight * prior) / (self.tested[depth] + weight)


class Expectations:
    """What a drafter's budgets bring in accepted tokens, by what became of its drafts: per row, the product of its
    acceptance rates down to each depth (few data lean on those of all rows); a budget of n nodes reaches the depth that
    drafts of n nodes had. first_rate: of a depth that was never tested.
    """

    def __init__(self, first_rate: float = 0.7) -> None:
        self.first_rate = first_rate
        self._all = _Rates(0.99)
        self._rows: dict[int, _Rates] = {}
        self._reached = _Times(follow=0.0)  # depth of drafts by their nodes

    def __contains__(self, row: int) -> bool:
        """Whether a row was heard of."""
        return row in self._rows

    def observe(self, rows: Sequence[int], outcomes: Sequence[Outcome]) -> None:
        """What became of a step's drafts."""
        for row, outcome in zip(rows, outcomes):
            mine = self._rows.setdefault(row, _Rates(0.95))
            if outcome.drafted:
                mine.add(outcome)
                self._all.add(outcome)
                self._reached.add(outcome.drafted, outcome.depth)

    def release(self, rows: Sequence[int]) -> None:
        """Rows have left."""
        for row in rows:
            self._rows.pop(row, None)

    def expected(self, row: int, most: int) -> list[float]:
        """Accepted tokens to be expected of budgets 0..most of a row."""
        gains, total, survival, below = [0.0], 0.0, 1.0, 0.0
        mine, rate, reached = self._rows.get(row), self.first_rate, 0
        for nodes in range(1, most + 1):
            depth = min(max(self._reached.at(nodes), below), nodes) if self._reached.keys else float(nodes)
            depth = max(depth, min(1.0, float(nodes)))
            while below < depth:
                if below >= reached:
                    rate = self._all.rate(reached, rate, 2.0)
                    survival *= rate if mine is None else mine.rate(reached, rate, 8.0)
                    reached += 1
                part = min(depth, float(reached)) - below
                total, below = total + part * survival, below + part
            gains.append(total)
        return gains


class Goodput:
    """As many nodes as bring the most tokens per second by what was measured, none where drafting does not pay.

    Tokens: `Expectations`. Seconds: a table of measured times by the nodes of a pass, and one of the drafter's work by
    the largest budget. Nodes are admitted one after another, the one that brings most first, and the best point on the
    way is taken (Liu et al. 2024, TurboSpec; the survival order of DSpark 2026), if it promises more than `margin`
    beyond plain steps. The first steps, and a step now and then, go to measuring.

    first_rate: what is expected of a depth that was never tested; probe: steps without drafts until the next try, which
    costs at most half a step more than a plain one and comes half as often every time that it changes nothing, down to
    a 64th; refresh: steps with drafts between two measurements of a step without; margin: a share of the speed.
    """

    name = "goodput"

    def __init__(self, first_rate: float = 0.7, probe: int = 32, refresh: int = 64, margin: float = 0.02) -> None:
        if not 0 <= first_rate <= 1:
            raise ValueError(f"goodput first_rate: got {first_rate}; expected a number in [0, 1]")
        if probe < 1 or refresh < 1:
            raise ValueError(f"goodput probe, refresh: got {probe}, {refresh}; expected at least 1")
        if not margin >= 0:
            raise ValueError(f"goodput margin: got {margin}; expected 0 or more")
        self._probe, self._refresh, self._margin = probe, refresh, margin
        self._expectations = Expectations(first_rate)
        self._verify, self._propose = _Times(), _Times()
        self._measuring = list(FIRST)
        self._idle, self._patience, self._busy, self._again = 0, probe, 0, 2

    def nodes(self, rows: Sequence[int], most: Sequence[int]) -> list[int]:
        if not any(most):
            return list(most)
        if self._measuring:
            return [min(limit, self._measuring[0]) for limit in most]
        chosen = self._best(rows, most)
        if not any(chosen):
            self._idle, self._busy, self._again = self._idle + 1, 0, 2
            if self._idle >= self._patience:
                self._idle, self._patience = 0, min(2 * self._patience, 64 * self._probe)
                return self._try(most)
            return chosen
        self._idle, self._busy = 0, self._busy + 1
        if self._busy >= self._again:  # at first a step without drafts follows soon: was it a slip of the clock?
            self._busy, self._again = 0, min(2 * self._again, self._refresh)
            self._patience = self._probe if self._again == self._refresh else self._patience
            return [0] * len(chosen)
        return chosen

    def observe(self, rows: Sequence[int], outcomes: Sequence[Outcome], propose: float, verify: float) -> None:
        drafted = [outcome.drafted for outcome in outcomes]
        known = all(row in self._expectations for row in rows)  # the first draft of a row may include its whole prompt
        if self._measuring:
            self._measuring.pop(0)
        self._verify.add(len(rows) + sum(drafted), verify)
        if known and any(drafted):
            self._propose.add(max(drafted), propose)
        self._expectations.observe(rows, outcomes)

    def release(self, rows: Sequence[int]) -> None:
        self._expectations.release(rows)

    def _try(self, most: Sequence[int]) -> list[int]:
        """As many nodes as cost half a step at most, and one in any case."""
        count = len(most)
        plain, limit = self._verify.at(count), max(most)
        while limit > 1:
            nodes = [min(limit, own) for own in most]
            if self._verify.at(count + sum(nodes)) + self._propose.at(limit) <= 1.5 * plain:
                break
            limit //= 2
        return [min(limit, own) for own in most]

    def _best(self, rows: Sequence[int], most: Sequence[int]) -> list[int]:
        gains = [self._expectations.expected(row, limit) for row, limit in zip(rows, most)]
        heap = [(own[0] - own[1], at) for at, own in enumerate(gains) if len(own) > 1]
        heapify(heap)
        count, tokens = len(rows), float(len(rows))
        nodes, order = [0] * len(rows), []
        best, keep, widest = (1 + self._margin) * tokens / max(self._verify.at(count), 1e-9), 0, 0
        while heap:
            gain, at = heap[0]
            tokens, count, nodes[at] = tokens - gain, count + 1, nodes[at] + 1
            widest = max(widest, nodes[at])
            order.append(at)
            found = tokens / max(self._verify.at(count) + self._propose.at(widest), 1e-9)
            if found > best:
                best, keep = found, len(order)
            own, after = gains[at], nodes[at]
            heapreplace(heap, (own[after] - own[after + 1], at) if after + 1 < len(own) else (1.0, at))
            if heap[0][0] > 0:  # what is left are rows that have all they asked for
                break
        chosen = [0] * len(rows)
        for at in order[:keep]:
            chosen[at] += 1
        return chosen


FIRST = (0, 4, 2, 0, 6, 0)  # nodes of the first steps: few, for nothing is known of what they cost or bring


POLICIES: dict[str, type[Fixed] | type[Goodput]] = {"fixed": Fixed, "goodput": Goodput}


def budget_for(policy: str | BudgetPolicy) -> BudgetPolicy:
    """A policy by name, or the object itself. Raises ValueError for an unknown name."""
    if not isinstance(policy, str):
        return policy
    if policy not in POLICIES:
        raise ValueError(f"budget: got {policy!r}; expected one of {', '.join(sorted(POLICIES))}")
    return POLICIES[policy]()


def surely_accepted(logits: Tensor, temperature: Tensor, scale: float = 0.2) -> Tensor:
    """A low estimate of the chance that a token of each law is accepted, from the law's entropy alone: float [R].

    1 - sqrt(scale * H), H in nats (Agrawal et al. 2024, AdaEDL). logits: [R, V]; temperature: float32 [R]; rows at
    temperature 0 are looked at as if at 1, for their certainty says nothing.
    """
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    inv_t = torch.where(temperature == 0, 1.0, 1.0 / temperature).to(wide)
    log_q = torch.log_softmax(logits.to(wide) * inv_t[:, None], dim=1)
    entropy = -(log_q.exp() * log_q.clamp(min=torch.finfo(wide).min)).sum(1)
    return 1 - (scale * entropy.clamp(min=0)).sqrt()


@dataclass(slots=True)
class MovingThreshold:
    """Below which a request's drafts end: moves by `step`, damped, towards a goal of accepted / drafted tokens.

    Zhang et al. 2023 (Draft & Verify, section 3.3), and after them Agrawal et al. 2024 (AdaEDL). rate: smoothed share
    of accepted tokens, 0 at the start.
    """

    threshold: float
    goal: float
    rate: float = 0.0
    step: float = 0.01
    keep_rate: float = 0.5
    keep_threshold: float = 0.9

    def update(self, accepted: int, drafted: int, full: bool) -> None:
        """After a verification of at least one token. full: it gives no reason to lower the threshold, since longer
        drafts were not allowed.
        """
        self.rate = self.keep_rate * self.rate + (1 - self.keep_rate) * accepted / drafted
        if self.rate < self.goal:
            wanted = self.threshold + self.step
        else:
            wanted = self.threshold if full else self.threshold - self.step
        self.threshold = self.keep_threshold * self.threshold + (1 - self.keep_threshold) * wanted
