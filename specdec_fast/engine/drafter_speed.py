"""Finds drafters that make decoding slower than plain decoding, and says so once.

Now and then a plain pass over the same rows, in the same contexts, is timed. Its result is dropped. The first
comparison follows after 32 steps with drafts, and each further one after twice as many, so the passes cost little.
Tests: tests/engine/test_drafter_speed.py.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch

from specdec_fast.adaptive.budget import BudgetPolicy
from specdec_fast.core.draft import Draft
from specdec_fast.engine.stats import Clock
from specdec_fast.interfaces import Drafter, StateView, Target

log = logging.getLogger("specdec_fast")

FIRST_WINDOW = 32
"""Steps with drafts before the first comparison."""

SLOW = 0.95
"""Speed relative to plain decoding below which a drafter counts as slow. Above it, a difference may be noise."""


class DrafterSpeed:
    """Compares steps with drafts with plain steps, at batch sizes and contexts as they come.

    Two windows in a row must be slow, so that a pause of the machine raises no warning. Budgets and drafters that
    measure the target's passes stop drafting by themselves where it does not pay, so they are not compared.

    Args:
        drafter: The drafter, or None.
        budget: The policy for draft nodes.

    Attributes:
        relative_speed: Speed relative to plain decoding in the last complete window; None before.
    """

    def __init__(self, drafter: Drafter | None, budget: BudgetPolicy) -> None:
        self._drafter = getattr(drafter, "name", "")
        self._window, self._slow_windows = FIRST_WINDOW, 0
        self._steps, self._tokens, self._rows, self._seconds, self._others = 0, 0, 0, 0.0, 0.0
        measured: Any = getattr(drafter, "pass_times", None)
        self._done = drafter is None or hasattr(budget, "calibrate") or getattr(measured, "prior", None) is not None
        self.relative_speed: float | None = None

    def observe(self, target: Target, view: StateView, rows: Sequence[int], kept: int, clock: Clock) -> None:
        """Adds a step with drafts, and compares if a window is complete.

        Args:
            target: The target.
            view: Committed data, with the tokens of this step.
            rows: Rows of the step, which all continue.
            kept: Tokens that the step added.
            clock: Seconds of the step.
        """
        if self._done:
            return
        seconds = clock.seconds
        self._steps, self._tokens, self._rows = self._steps + 1, self._tokens + kept, self._rows + len(rows)
        self._others += seconds["verify"] + seconds["commit"] + seconds["append"]
        self._seconds += clock.verifying + seconds["propose"] + seconds["observe"]
        if self._steps < self._window:
            return
        try:
            plain = time_plain_pass(target, rows, [view.tokens(row)[-1] for row in rows], view.device)
        except Exception as error:  # decoding continues without the comparison
            log.debug("no plain pass could be timed: %s", error)
            self._done = True
            return
        self.compare(plain)

    def compare(self, plain_pass: float) -> None:
        """Ends a window.

        Args:
            plain_pass: Seconds of a target pass without drafts.
        """
        steps = self._steps
        step, plain = self._seconds / steps, plain_pass + self._others / steps
        per_row = self._tokens / self._rows
        self.relative_speed = per_row * plain / step
        slow = self.relative_speed < SLOW
        self._slow_windows = self._slow_windows + 1 if slow else 0
        self._steps, self._tokens, self._rows, self._seconds, self._others = 0, 0, 0, 0.0, 0.0
        self._window *= 1 if slow else 2
        if self._slow_windows == 2:
            self._done = True
            log.warning(
                "drafter %s makes decoding slower: %.2f of the speed of plain decoding over the last %d steps "
                "(%.2f tokens per target pass, %.2f times the time of a plain step); the text is not affected; try "
                "drafter auto, a smaller num_draft_tokens or budget goodput, or choose another drafter or none",
                *(self._drafter, self.relative_speed, steps, per_row, step / plain),
            )


def time_plain_pass(target: Target, rows: Sequence[int], roots: Sequence[int], device: torch.device) -> float:
    """Measures a target pass without drafts. Nothing is committed.

    Args:
        target: The target.
        rows: Rows that hold committed tokens.
        roots: Last token of each row, which the cache does not hold yet.
        device: The target's device.

    Returns:
        Seconds of the pass.
    """
    draft = Draft.chains(list(rows), [[root] for root in roots], device=device)
    start = perf_counter()
    target.score(draft, draft.get_plan())
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter() - start
