"""The progress of a head's training: a bar on a terminal, and a line every ten seconds in a pipe.

Tests: tests/train/heads/test_progress_bar.py.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping

from specdec_fast.train.heads.time_left import format_seconds

_EVERY = 10.0
"""Seconds between two lines in a pipe."""


class ProgressBar:
    """Shows steps and measurements on standard error; only the first of several processes prints.

    Args:
        title: First words of every line.
    """

    def __init__(self, title: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._live, self._last, self._title = sys.stderr.isatty(), float("-inf"), title
        self._timed = False
        self._mute = os.environ.get("RANK", "0") != "0"
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"))
        self._bar = Progress(*columns, console=Console(stderr=True), disable=not self._live or self._mute)
        self._task = self._bar.add_task(title, total=1.0, note="")

    def __enter__(self) -> ProgressBar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, share: float, found: Mapping[str, float], left: float) -> None:
        """Shows a finished step; see `trainer.Report`."""
        note = f"loss {found['loss']:.3f}, {found.get('tokens_per_step', 1.0):.2f} tokens per step"
        ends = format_seconds(left)
        if ends and not self._timed:  # the first estimate is shown at once
            self._timed, self._last = True, float("-inf")
        self._show(f"{note}, {ends}" if ends else note, share)

    def measuring(self, done: int, count: int) -> None:
        """Shows a pass over the held-out text, which may take minutes."""
        if done < count:
            self._show(f"measuring on held-out text, block {done} of {count}")

    def _show(self, note: str, share: float | None = None) -> None:
        if share is None:
            self._bar.update(self._task, note=note)
        else:
            self._bar.update(self._task, note=note, completed=share)
        now = time.monotonic()
        if not self._live and not self._mute and (share == 1 or now - self._last > _EVERY):
            self._last = now
            percent = "" if share is None else f"{share:.0%}, "
            print(f"{self._title}: {percent}{note}", file=sys.stderr, flush=True)
