"""How many draft nodes each row gets in a step: as many as were asked for (`fixed`), those of them that the draft's
distribution is sure enough of (`entropy`), or as many as pay (`goodput`).

A policy sees committed data and the times of past steps, never a draft that is about to be verified: settling a budget
by what was drawn would change the distribution of the text under rules that use q. `surely_accepted` is for drafters
that stop early: it looks at the distribution of a token that is not drawn yet. `MovingThreshold` is for them too: it
looks at what became of earlier drafts. Tests: tests/adaptive/test_budget.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from specdec_fast.adaptive.cost_model import CostModel, Outcome, Times
from specdec_kernels.names import unknown_name


@runtime_checkable
class BudgetPolicy(Protocol):
    """Decides before a draft is made; hears afterwards what became of it and what it cost.

    A policy whose numbers never follow from other requests may say `cross_request = False` in its class (see
    `Needs.cross_request`); what a class that it is derived from says does not count.
    """

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
    cross_request = False

    def nodes(self, rows: Sequence[int], most: Sequence[int]) -> list[int]:
        return list(most)

    def observe(self, rows: Sequence[int], outcomes: Sequence[Outcome], propose: float, verify: float) -> None:
        pass

    def release(self, rows: Sequence[int]) -> None:
        pass


class Entropy(Fixed):
    """Every row gets what it asked for, and the drafter ends a chain before a token whose distribution is too
    uncertain.

    threshold: what `surely_accepted` has to reach, for a drafter that was given no `entropy_stop` of its own; the
    drafter is told once and keeps it.
    """

    name = "entropy"
    cross_request = False

    def __init__(self, threshold: float = 0.05) -> None:
        if not 0 < threshold < 1:
            raise ValueError(f"entropy threshold: got {threshold}; expected a number above 0 and below 1")
        self.threshold = threshold

    def settle(self, drafter: Any) -> None:
        """Tells a drafter to stop. Raises ValueError for one that cannot: it has no distribution before it has a
        token.
        """
        if not hasattr(drafter, "entropy_stop"):
            raise ValueError(
                f"budget entropy: got drafter {drafter.name}, which does not stop by a distribution; expected "
                f"draft_model, or "
                "budget fixed or goodput"
            )
        drafter.entropy_stop = drafter.entropy_stop or self.threshold


class Goodput:
    """As many nodes as bring the most tokens per second by what was measured, none where drafting does not pay.

    Tokens: `CostModel`. Seconds: a table of measured times by the nodes of a pass, and one of the drafter's work by
    the largest budget. A drafter that often has no draft is expected to cost its work every time, the larger pass as
    often as it has nodes, score-only nodes included, and to bring tokens as often as some of them may be accepted.
    Nodes are admitted one after another, the one that brings most first, and the best point on the way is taken (Liu
    et al. 2024, TurboSpec; the survival order of DSpark 2026), if it promises more than `margin` beyond plain steps.
    The first steps, and a step now and then, go to measuring.

    first_rate: what is expected of a depth that was never tested; probe: steps without drafts until the next try, which
    costs at most half a step more than a plain one and comes half as often every time that it changes nothing, down to
    a 64th; refresh: steps with drafts between two measurements of a step without; margin: a share of the speed of steps
    that have drafts; free: a share of a plain step's time; drafters that work no longer are not left unasked for it.
    """

    name = "goodput"

    def __init__(
        self, first_rate: float = 0.7, probe: int = 32, refresh: int = 64, margin: float = 0.02, free: float = 0.005
    ) -> None:
        if not 0 <= first_rate <= 1:
            raise ValueError(f"goodput first_rate: got {first_rate}; expected a number in [0, 1]")
        if probe < 1 or refresh < 1:
            raise ValueError(f"goodput probe, refresh: got {probe}, {refresh}; expected at least 1")
        if not margin >= 0 or not free >= 0:
            raise ValueError(f"goodput margin, free: got {margin}, {free}; expected 0 or more")
        self._probe, self._refresh, self._margin, self._free = probe, refresh, margin, free
        self._expectations = CostModel(first_rate)
        self._verify, self._propose = Times(), Times()
        self._measuring = list(FIRST)
        self._asked: dict[int, int] = {}  # nodes of each row in this step
        self._idle, self._patience, self._busy, self._again = 0, probe, 0, 2

    def nodes(self, rows: Sequence[int], most: Sequence[int]) -> list[int]:
        chosen = self._choose(rows, most)
        self._asked = dict(zip(rows, chosen))
        return chosen

    def _choose(self, rows: Sequence[int], most: Sequence[int]) -> list[int]:
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
        asked = [self._asked.get(row, 0) for row in rows]
        known = all(row in self._expectations for row in rows)  # the first draft of a row may include its whole prompt
        if self._measuring:
            self._measuring.pop(0)
        self._verify.add(len(rows) + sum(outcome.nodes for outcome in outcomes), verify)
        if known and any(asked):
            self._propose.add(max(asked), propose)
        self._expectations.observe(rows, asked, outcomes)

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
        chances = [(self._expectations.answered(row), self._expectations.scored(row)) for row in rows]
        verify, propose = self._verify.table(len(rows) + sum(most)), self._propose.table(max(most))
        heap = [(own[0] - own[1], at) for at, own in enumerate(gains) if len(own) > 1]
        heapify(heap)
        count, tokens, plain = len(rows), float(len(rows)), max(verify[len(rows)], 1e-9)
        nodes, order, free, seconds = [0] * len(rows), [], self._free * plain, plain
        best, keep, widest, likeliest = tokens / plain, 0, 0, 0.0
        while heap:
            gain, at = heap[0]
            (chance, paid), count, nodes[at] = chances[at], count + 1, nodes[at] + 1
            tokens, seconds = tokens - chance * gain, seconds + paid * (verify[count] - verify[count - 1])
            widest, likeliest = max(widest, nodes[at]), max(likeliest, paid)
            order.append(at)
            work = propose[widest] if propose[widest] > free else 0.0
            cost = max(seconds, plain) + work  # a larger pass that seems to take less is a slip of the clock
            found = tokens / ((1 + self._margin * likeliest) * cost)
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


POLICIES: dict[str, type[Fixed] | type[Goodput]] = {"entropy": Entropy, "fixed": Fixed, "goodput": Goodput}


def budget_for(policy: str | BudgetPolicy) -> BudgetPolicy:
    """A policy by name, or the object itself. Raises ValueError for an unknown name and for what is no policy."""
    if isinstance(policy, BudgetPolicy):
        return policy
    if not isinstance(policy, str) or policy not in POLICIES:
        raise ValueError(unknown_name("budget", policy, sorted(POLICIES), or_else=", or a BudgetPolicy"))
    return POLICIES[policy]()


def surely_accepted(logits: Tensor, temperature: Tensor, scale: float = 0.2) -> Tensor:
    """A low estimate of the chance that a token of each distribution is accepted, from the distribution's entropy
    alone: float [R].

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
