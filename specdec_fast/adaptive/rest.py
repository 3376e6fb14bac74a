"""Pauses a part of a drafter while it costs more time than its drafts save. Tests: tests/adaptive/test_rest.py."""

from __future__ import annotations

WINDOW = 8
"""Steps after which cost and gain are compared."""

FIRST, LONGEST = 16, 128
"""Steps of the first pause and of the longest one. Each pause after another is twice as long."""

SHARE = 0.01
"""A window should lose at most this share of the time of itself and of the pause after it. A pause that is too short is
prolonged up to `LONGEST`, since steps of a millisecond do not bear what longer ones do."""


class Rest:
    """Decides in which steps a part takes part.

    A pause follows a window in which the part cost more than it gained. The part is tried again after the pause.
    """

    def __init__(self) -> None:
        self._next, self._left, self._owed = FIRST, 0, 0
        self._steps, self._balance = 0, 0.0

    def end(self) -> None:
        """Ends a pause, but for the steps that make up for its window. The next one is as long as without this call."""
        self._left, self._steps, self._balance = self._owed, 0, 0.0

    def takes_part(self) -> bool:
        """Counts a step. Returns whether the part takes part in it."""
        if self._left:
            self._left, self._owed = self._left - 1, max(self._owed - 1, 0)
            return False
        return True

    def add(self, cost: float, gain: float, step: float) -> None:
        """Adds a step in which the part took part. A window that gained ends a pause.

        Args:
            cost: Seconds that the part needed.
            gain: Seconds that its drafts are expected to save.
            step: Seconds of a step without drafts.
        """
        self._steps, self._balance = self._steps + 1, self._balance + gain - cost
        if self._steps < WINDOW:
            return
        if self._balance < 0:
            self._owed = min(max(int(-self._balance / (SHARE * max(step, 1e-9))) - WINDOW, 0), LONGEST)
            self._left, self._next = max(self._next, self._owed), min(2 * self._next, LONGEST)
        else:
            self._left, self._owed, self._next = 0, 0, FIRST
        self._steps, self._balance = 0, 0.0
