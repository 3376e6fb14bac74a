"""Progress of a benchmark: a line on standard error every ten seconds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from time import perf_counter

EVERY = 10.0
"""Seconds between lines: few enough for the log of a build machine."""


def _write(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class Progress:
    """Counts finished texts, and prints their number.

    Args:
        what: Title, with which every line begins.
        total: Number of texts.
        write: Prints a line.
        clock: Clock in seconds.
    """

    def __init__(
        self, what: str, total: int, write: Callable[[str], None] = _write, clock: Callable[[], float] = perf_counter
    ) -> None:
        self.what, self.total, self._write, self._clock = what, total, write, clock
        self.done = 0
        self._began = self._said = clock()
        write(f"{what}: {total} texts")

    def counted(self, run: Callable[[], None]) -> Callable[[], None]:
        """Returns a function that runs one text and counts it."""

        def one() -> None:
            run()
            self.step()

        return one

    def step(self) -> None:
        """Counts a finished text."""
        self.done += 1
        now = self._clock()
        if now - self._said < EVERY and self.done < self.total:
            return
        self._said, seconds = now, now - self._began
        left = "" if self.done >= self.total else f", about {seconds / self.done * (self.total - self.done):.0f} s left"
        self._write(f"{self.what}: {self.done} of {self.total} texts in {seconds:.0f} s{left}")
