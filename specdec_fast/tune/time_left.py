"""The remaining time of a search, from the trials that were measured. Tests: tests/tune/test_time_left.py."""

from __future__ import annotations

from time import monotonic


class TrialClock:
    """Estimates the remaining time by the mean duration of trials.

    Args:
        last: Trials that follow the search: finalists and measurements of the winner.
    """

    def __init__(self, last: int) -> None:
        self._last, self._count, self._seconds = last, 0, 0.0
        self._began = monotonic()

    def start(self) -> None:
        """Begins the first trial."""
        self._began = monotonic()

    def after_trial(self, left: int | None) -> str:
        """Counts a trial, and returns the remaining time as the end of a line.

        Args:
            left: Trials left in the search. None for one that follows the search, which is not counted.

        Returns:
            Words, empty if nothing was counted.
        """
        if left is None:
            return ""
        self._count, self._seconds = self._count + 1, monotonic() - self._began
        return self.of(left + self._last)

    def of(self, trials: int) -> str:
        """Returns the duration of a number of trials as the end of a line; empty before one was measured."""
        if not self._count:
            return ""
        seconds = self._seconds / self._count * trials
        return f", about {seconds:.0f} s left" if seconds < 120 else f", about {seconds / 60:.0f} min left"
