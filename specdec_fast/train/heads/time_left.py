"""The remaining time of a training run, from the durations that this run has measured.

Tests: tests/train/heads/test_time_left.py.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import fmean

_WINDOW = 50
"""Steps whose mean duration counts, since a machine may become slower or faster."""


@dataclass(slots=True)
class TimeLeft:
    """Estimates the remaining time: steps, measurements, checkpoints, and the head at the end.

    The first step of a run is left out, because it allocates memory and may compile.

    Attributes:
        steps: Steps of the whole run.
        measure_every: Steps between two measurements.
        final_measurements: Passes over the held-out text after the last step.
    """

    steps: int
    measure_every: int
    final_measurements: int = 0
    _step_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    _seen: int = 0
    _measure_seconds: float = 0.0
    _checkpoint_seconds: float = 0.0
    _checkpoints: int = 0

    def add_step(self, seconds: float) -> None:
        """Adds the duration of a step."""
        self._seen += 1
        if self._seen > 1:
            self._step_seconds.append(seconds)

    def add_measurement(self, seconds: float) -> None:
        """Adds the duration of a pass over the held-out text."""
        self._measure_seconds = seconds

    def add_checkpoint(self, seconds: float) -> None:
        """Adds the duration of a checkpoint."""
        self._checkpoint_seconds = seconds
        self._checkpoints += 1

    def seconds(self, step: int) -> float:
        """Returns the remaining seconds after a step; NaN before the second step of this run is measured."""
        if not self._step_seconds:
            return float("nan")
        left = self.steps - step
        measurements = self.final_measurements + self.steps // self.measure_every - step // self.measure_every
        if left and self.steps % self.measure_every:
            measurements += 1  # after the last step
        checkpoints = left * self._checkpoints / self._seen + (self._checkpoints > 0)  # the head is written too
        return (
            left * fmean(self._step_seconds)
            + measurements * self._measure_seconds
            + checkpoints * self._checkpoint_seconds
        )


def format_seconds(seconds: float) -> str:
    """Formats a remaining time, such as "1 h 05 min left"; empty if it is NaN."""
    if seconds != seconds:
        return ""
    whole = max(round(seconds), 0)
    if whole < 120:
        return f"{whole} s left"
    minutes = round(whole / 60)
    return f"{minutes} min left" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min left"
