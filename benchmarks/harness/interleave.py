"""Times several ways of doing the same work in turn, round after round, so that drift of the machine hits all alike."""

from __future__ import annotations

import gc
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from statistics import median
from time import perf_counter
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds per round of each side."""

    seconds: dict[str, list[float]]

    def median(self, side: str) -> float:
        return median(self.seconds[side])

    def ratio(self, slow: str, fast: str) -> float:
        """How many times faster `fast` is: the median of the round-by-round ratios."""
        return median(a / b for a, b in zip(self.seconds[slow], self.seconds[fast]))

    def spread(self, slow: str, fast: str) -> tuple[float, float]:
        """Smallest and largest round-by-round ratio."""
        ratios = [a / b for a, b in zip(self.seconds[slow], self.seconds[fast])]
        return min(ratios), max(ratios)


def interleave(
    sides: Mapping[str, Callable[[], Any]], rounds: int, clock: Callable[[], float] = perf_counter, turns: int = 1
) -> Timing:
    """Run every side `turns` times per round, one after the other, rotating who goes first; one uncounted round before.

    A round's seconds are those of its turns together: where the work is many pieces, one piece a turn keeps sides that
    are compared seconds apart and not minutes. clock: `time.process_time` where other programs share the machine and
    the work is on one thread.
    """
    for _ in range(turns):
        for run in sides.values():
            run()
    seconds: dict[str, list[float]] = {name: [0.0] * rounds for name in sides}
    names = list(sides)
    gc.collect()
    gc.disable()
    try:
        for turn in range(rounds * turns):
            shift = turn % len(names)
            for name in names[shift:] + names[:shift]:
                start = clock()
                sides[name]()
                seconds[name][turn // turns] += clock() - start
    finally:
        gc.enable()
    return Timing(seconds)


def alternate(
    engines: Sequence[Any], prompt: list[int], params: Any, clock: Callable[[], float] = perf_counter
) -> tuple[list[float], list[Any]]:
    """Writes the same text by several engines, one step of each in turn; returns their seconds and handles.

    All run within the same milliseconds, so other load on the machine affects them alike.
    """
    handles = [engine.submit(prompt, params) for engine in engines]
    seconds, order = [0.0] * len(engines), list(range(len(engines)))
    gc.collect()
    gc.disable()
    try:
        while not all(handle.finished for handle in handles):
            for at in order:
                if not handles[at].finished:
                    start = clock()
                    engines[at].step()
                    seconds[at] += clock() - start
            order.reverse()
    finally:
        gc.enable()
    return seconds, handles


def cpu_name(info: str) -> str:
    """The first processor of /proc/cpuinfo, or "". Guests of one cloud may all be called alike, so family and model are
    part of the name where the machine has such numbers.
    """
    first, _, _ = info.partition("\n\n")
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}
    numbers = ", ".join(f"{key.removeprefix('cpu ')} {facts[key]}" for key in ("cpu family", "model") if key in facts)
    name = facts.get("model name", "")
    return f"{name} ({numbers})" if name and numbers else name


def environment() -> dict[str, Any]:
    """Machine and versions, for result files."""
    import transformers

    try:
        with open("/proc/cpuinfo") as info:
            cpu = cpu_name(info.read())
    except OSError:
        cpu = ""
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "cpu": cpu or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "load_before": [round(load, 2) for load in os.getloadavg()],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
