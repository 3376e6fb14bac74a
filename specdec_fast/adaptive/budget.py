"""Draft budgets: the number of draft nodes that each row gets in a step.

Policy `fixed` grants each request's own number, `goodput` grants the nodes that increase tokens per second, and
`entropy` makes the drafter stop at uncertain distributions. A policy sees committed data and the times of past steps.
It never sees a draft that is about to be verified: a budget that follows sampled tokens would change the distribution
of the text under rules that use q. `acceptance_lower_bound` is for drafters that stop early, and reads the distribution
of a token that is not sampled yet. `MovingThreshold` follows the outcomes of earlier drafts.
Tests: tests/adaptive/test_budget.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from specdec_fast.adaptive.cost_model import CostModel, DraftOutcome, TimeTable
from specdec_fast.adaptive.pass_times import PASSES, measure_pass_times
from specdec_fast.interfaces import Target
from specdec_kernels.unknown_names import unknown_name


@runtime_checkable
class BudgetPolicy(Protocol):
    """Decides the budgets of a step before its drafts are made, and observes outcomes and times afterwards.

    A policy whose budgets never depend on other requests may set `cross_request = False` in its class (see
    `Needs.cross_request`). The attribute is not inherited. A policy that decides by the seconds that it observes sets
    `follows_clock = True`: processes that compute one model together refuse it. A policy with a method
    `configure_drafter(drafter)` is called with the drafter once.

    Attributes:
        name: Name of the policy.
    """

    name: str

    def nodes(self, rows: Sequence[int], most: Sequence[int]) -> list[int]:
        """Decides the budgets of a step.

        Args:
            rows: Rows of the step.
            most: Largest budget of each row.

        Returns:
            Draft nodes of each row, at most `most`.
        """

    def observe(self, rows: Sequence[int], outcomes: Sequence[DraftOutcome], propose: float, verify: float) -> None:
        """Observes the end of a step.

        Args:
            rows: Rows of the step.
            outcomes: Outcome of each row's draft.
            propose: Seconds of the drafter's work.
            verify: Seconds from the target's pass to the committed tokens.
        """

    def release(self, rows: Sequence[int]) -> None:
        """Removes rows."""


class Fixed:
    """Grants every row the number of draft tokens of its request."""

    name = "fixed"
    cross_request = False

    def nodes(self, rows: Sequence[int], most: Sequence[int]) -> list[int]:
        """Returns the largest budget of every row."""
        return list(most)

    def observe(self, rows: Sequence[int], outcomes: Sequence[DraftOutcome], propose: float, verify: float) -> None:
        """Does nothing: the budgets follow no measurement."""

    def release(self, rows: Sequence[int]) -> None:
        """Does nothing: no row has state here."""


class Entropy(Fixed):
    """Grants what `Fixed` grants, and makes the drafter end a chain before a too uncertain distribution.

    Args:
        threshold: Lower limit of `acceptance_lower_bound`, for drafters without an `entropy_stop` of their own.

    Raises:
        ValueError: If `threshold` is not between 0 and 1.
    """

    name = "entropy"
    cross_request = False

    def __init__(self, threshold: float = 0.05) -> None:
        if not 0 < threshold < 1:
            raise ValueError(f"entropy threshold: got {threshold}; expected a number above 0 and below 1")
        self.threshold = threshold

    def configure_drafter(self, drafter: Any) -> None:
        """Sets the drafter's `entropy_stop`, once.

        Args:
            drafter: The engine's drafter.

        Raises:
            ValueError: If the drafter cannot stop by a distribution.
        """
        if not hasattr(drafter, "entropy_stop"):
            raise ValueError(
                f"budget entropy: got drafter {drafter.name}, which cannot stop by a distribution; "
                "expected draft_model, or budget fixed or goodput"
            )
        drafter.entropy_stop = drafter.entropy_stop or self.threshold


class Goodput:
    """Grants the nodes that bring the most tokens per second by measurement, or none if drafting does not pay.

    Expected tokens come from a `CostModel`. Seconds come from two tables of measured times: target passes by nodes, and
    the drafter's work by the largest budget. A drafter that often has no draft costs its work every time, and the
    larger pass only when it has nodes.

    Nodes are granted one by one, the one with the largest expected gain first. The best point on the way is used if it
    exceeds the speed of plain steps by `margin`. A step now and then is a measurement. So are the first steps, unless
    `calibrate` has measured the target's passes before.

    Args:
        first_rate: Acceptance rate of a token that was never tested.
        probe: Steps without drafts until the next try. A try costs at most half a plain step more. The interval doubles
            with every try without effect, up to 64 times.
        margin: Required gain, as a share of the speed.

    Raises:
        ValueError: If an option is out of range.

    Source:
        Liu et al. 2024 (TurboSpec); DSpark 2026 for the order by survival.
    """

    name = "goodput"
    follows_clock = True

    def __init__(self, first_rate: float = 0.7, probe: int = 32, margin: float = 0.02) -> None:
        if not 0 <= first_rate <= 1:
            raise ValueError(f"goodput first_rate: got {first_rate}; expected a number in [0, 1]")
        if probe < 1:
            raise ValueError(f"goodput probe: got {probe}; expected at least 1")
        if not margin >= 0:
            raise ValueError(f"goodput margin: got {margin}; expected 0 or more")
        self._probe, self._margin = probe, margin
        self._cost_model = CostModel(first_rate)
        self._verify_times, self._propose_times = TimeTable(), TimeTable()
        self._warmup_budgets = list(WARMUP_BUDGETS)
        self._granted: dict[int, int] = {}  # budget of each row in this step
        self._idle_steps, self._probe_interval, self._draft_steps, self._refresh_interval = 0, probe, 0, 2

    def calibrate(self, target: Target, max_nodes: int) -> None:
        """Measures the target's passes, so that the first steps need no small drafts. `load` calls it.

        Args:
            target: The target, before its first request.
            max_nodes: Most draft nodes of a request.
        """
        times = measure_pass_times(target, {*(min(size, 1 + max_nodes) for size in PASSES), 1 + max_nodes})
        if times is not None:
            self._verify_times.prior, self._warmup_budgets = times, []
            self._refresh_interval = _FIRST_REFRESH

    def nodes(self, rows: Sequence[int], most: Sequence[int]) -> list[int]:
        """Returns the budgets with the best measured goodput, or those of a measurement."""
        budgets = self._choose_budgets(rows, most)
        self._granted = dict(zip(rows, budgets))
        return budgets

    def _choose_budgets(self, rows: Sequence[int], most: Sequence[int]) -> list[int]:
        """Budgets of a step: a measurement, a probe, or the best by measurement."""
        if not any(most):
            return list(most)
        if self._warmup_budgets:
            return [min(limit, self._warmup_budgets[0]) for limit in most]
        # while drafts do not pay, little is measured that could change it: most steps decide nothing anew
        skipped = bool(self._idle_steps % _IDLE_STEPS_PER_DECISION) and all(row in self._cost_model for row in rows)
        budgets = [0] * len(rows) if skipped else self._maximize_goodput(rows, most)
        if not any(budgets):
            self._idle_steps, self._draft_steps, self._refresh_interval = self._idle_steps + 1, 0, 2
            if self._idle_steps >= self._probe_interval:
                self._idle_steps, self._probe_interval = 0, min(2 * self._probe_interval, 64 * self._probe)
                return self._probe_budgets(most)
            return budgets
        self._idle_steps, self._draft_steps = 0, self._draft_steps + 1
        # the first step without drafts follows soon, to check the measurement
        if self._draft_steps >= self._refresh_interval:
            self._draft_steps, self._refresh_interval = 0, min(2 * self._refresh_interval, _REFRESH)
            self._probe_interval = self._probe if self._refresh_interval == _REFRESH else self._probe_interval
            return [0] * len(budgets)
        return budgets

    def observe(self, rows: Sequence[int], outcomes: Sequence[DraftOutcome], propose: float, verify: float) -> None:
        """Adds the times and outcomes of a step to the cost model."""
        budgets = [self._granted.get(row, 0) for row in rows]
        known = all(row in self._cost_model for row in rows)  # the first draft of a row may process its whole prompt
        if self._warmup_budgets:
            self._warmup_budgets.pop(0)
        self._verify_times.add(len(rows) + sum(outcome.num_scored for outcome in outcomes), verify)
        if known and any(budgets):
            self._propose_times.add(max(budgets), propose)
        self._cost_model.observe(rows, budgets, outcomes)

    def release(self, rows: Sequence[int]) -> None:
        """Removes the acceptance rates of rows."""
        self._cost_model.release(rows)

    def _probe_budgets(self, most: Sequence[int]) -> list[int]:
        """The largest budgets that add at most half a step's time, and at least one node."""
        count = len(most)
        plain, limit = self._verify_times.seconds_at(count), max(most)
        while limit > 1:
            nodes = [min(limit, own) for own in most]
            if self._verify_times.seconds_at(count + sum(nodes)) + self._propose_times.seconds_at(limit) <= 1.5 * plain:
                break
            limit //= 2
        return [min(limit, own) for own in most]

    def _maximize_goodput(self, rows: Sequence[int], most: Sequence[int]) -> list[int]:
        """The budgets with the most expected tokens per second."""
        gains = [self._cost_model.node_gains(row, limit) for row, limit in zip(rows, most)]
        sizes = [self._cost_model.size_probabilities(row, limit) for row, limit in zip(rows, most)]
        verify, propose = self._verify_times.table(len(rows) + sum(most)), self._propose_times.table(max(most))
        heap = [(-own[0], at) for at, own in enumerate(gains) if own]
        heapify(heap)
        tokens, plain, expected = float(len(rows)), max(verify[len(rows)], 1e-9), 0.0  # expected: nodes of all drafts
        nodes, order, free, seconds = [0] * len(rows), [], _FREE * plain, plain
        best, keep, widest, likeliest, own_expected = tokens / plain, 0, 0, 0.0, [0.0] * len(rows)
        while heap:
            gain, at = heap[0]
            chance, nodes[at] = sizes[at][nodes[at]], nodes[at] + 1
            # the row has this node only with all those before; of the other rows, the expected nodes are there
            others = int(len(rows) + expected - own_expected[at])
            slope = verify[others + nodes[at]] - verify[others + nodes[at] - 1]
            tokens, seconds = tokens - gain, seconds + chance * slope
            expected, own_expected[at] = expected + chance, own_expected[at] + chance
            widest, likeliest = max(widest, nodes[at]), max(likeliest, chance)
            order.append(at)
            work = propose[widest] if propose[widest] > free else 0.0
            cost = max(seconds, plain) + work  # a larger pass cannot take less time
            found = tokens / ((1 + self._margin * likeliest) * cost)
            own, after = gains[at], nodes[at]
            # within a run of equal gains, which is a mean, a part of the run may bring nothing
            if found > best and (after == len(own) or own[after] < own[after - 1]):
                best, keep = found, len(order)
            heapreplace(heap, (-own[after], at) if after < len(own) else (1.0, at))
            if heap[0][0] > 0:  # all remaining rows have their largest budget
                break
        budgets = [0] * len(rows)
        for at in order[:keep]:
            budgets[at] += 1
        return budgets


WARMUP_BUDGETS = (0, 4, 2, 0, 6, 0)
"""Budgets of the first steps: small, since cost and gain are unknown."""


_IDLE_STEPS_PER_DECISION = 4
"""Steps without drafts for one computation of the best budgets."""


_FREE = 0.005
"""Drafter work below this share of a plain step's time counts as free."""


_REFRESH = 64
"""Steps with drafts between two measurements of a step without."""


_FIRST_REFRESH = 16
"""Steps with drafts before the first one without, if the target's passes were measured before."""


POLICIES: dict[str, type[Fixed] | type[Goodput]] = {"entropy": Entropy, "fixed": Fixed, "goodput": Goodput}


def budget_for(policy: str | BudgetPolicy) -> BudgetPolicy:
    """Returns a budget policy.

    Args:
        policy: Name of a policy, or a `BudgetPolicy`, which is returned unchanged.

    Returns:
        The policy.

    Raises:
        ValueError: If the name is unknown, or if the object is no policy.
    """
    if isinstance(policy, BudgetPolicy):
        return policy
    if not isinstance(policy, str) or policy not in POLICIES:
        raise ValueError(unknown_name("budget", policy, sorted(POLICIES), or_else=", or a BudgetPolicy"))
    return POLICIES[policy]()


def acceptance_lower_bound(logits: Tensor, temperature: Tensor, scale: float = 0.2) -> Tensor:
    """Computes a lower estimate of the acceptance probability of a token, from the entropy of its distribution.

    The estimate is 1 - sqrt(scale * H), H in nats. Rows at temperature 0 are treated as at temperature 1.

    Args:
        logits: Draft logits [R, V].
        temperature: Temperature of each row, float32 [R].
        scale: Factor of the entropy.

    Returns:
        Estimates, float [R]. They may be negative.

    Source:
        Agrawal et al. 2024 (AdaEDL).
    """
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    inv_t = torch.where(temperature == 0, 1.0, 1.0 / temperature).to(wide)
    log_q = torch.log_softmax(logits.to(wide) * inv_t[:, None], dim=1)
    entropy = -(log_q.exp() * log_q.clamp(min=torch.finfo(wide).min)).sum(1)
    return 1 - (scale * entropy.clamp(min=0)).sqrt()


@dataclass(slots=True)
class MovingThreshold:
    """A threshold below which a request's drafts end. It moves towards a goal of accepted / drafted tokens.

    Attributes:
        threshold: Current threshold.
        goal: Share of accepted tokens to aim at.
        rate: Smoothed share of accepted tokens, 0 at the start.
        step: Size of a move, before damping.
        keep_rate: Weight of the old `rate`.
        keep_threshold: Weight of the old `threshold`.

    Source:
        Zhang et al. 2023 (Draft & Verify), section 3.3; Agrawal et al. 2024 (AdaEDL).
    """

    threshold: float
    goal: float
    rate: float = 0.0
    step: float = 0.01
    keep_rate: float = 0.5
    keep_threshold: float = 0.9

    def update(self, accepted: int, drafted: int, full: bool) -> None:
        """Moves the threshold after the verification of at least one token.

        Args:
            accepted: Accepted tokens.
            drafted: Drafted tokens.
            full: The whole budget was accepted. The threshold is not lowered then, since longer drafts were not
                allowed.
        """
        self.rate = self.keep_rate * self.rate + (1 - self.keep_rate) * accepted / drafted
        if self.rate < self.goal:
            wanted = self.threshold + self.step
        else:
            wanted = self.threshold if full else self.threshold - self.step
        self.threshold = self.keep_threshold * self.threshold + (1 - self.keep_threshold) * wanted
