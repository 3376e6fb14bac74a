"""Measures the seconds of target passes by their number of nodes, before any request runs.

Tests: tests/adaptive/test_pass_times.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from time import perf_counter
from typing import Any

import torch

from specdec_fast.adaptive.cost_model import TimeTable
from specdec_fast.core.draft import Draft
from specdec_fast.interfaces import Target

PASSES = (1, 2, 4)
"""Small numbers of nodes. A second node may cost more than any later one, since products of one row are special."""

SECONDS, MOST_REPEATS = 0.1, 10
"""Rounds of passes are repeated until so many seconds have passed: at least `repeats` of them, at most so many. Passes
of a millisecond vary more than long ones."""


def measure_pass_times(target: Target, nodes: Iterable[int] = (*PASSES, 17), repeats: int = 2) -> TimeTable | None:
    """Measures target passes over chains on a free row, and leaves the cache as it was.

    Args:
        target: The target. Its cache must be free.
        nodes: Numbers of nodes to measure, the root included. Those that the cache has no space for are cut to it.
        repeats: Fewest passes of each number, in turn with the others. The fastest counts. One more pass of each number
            comes first, and does not count.

    Returns:
        Seconds by number of nodes. None if the cache is in use, or has no space for two, or if other processes compute
        passes too: each would measure as often as its own clock says.
    """
    cache: Any = target.cache
    if getattr(target, "ranks", None) is not None:
        return None
    room = min(cache.max_length, cache.pages.num_free * cache.page_size)
    sizes = sorted({min(size, room) for size in nodes})
    if cache.pages.num_used or room < 2 or not cache.reserve(0, sizes[-1]):
        return None
    device = cache.device
    times = TimeTable(slowdown_rate=0.0)
    try:
        with torch.inference_mode():
            for number in sizes[::-1]:
                _time_pass(target, number, device)
            began = perf_counter()
            for done in range(max(repeats, MOST_REPEATS)):
                if done >= repeats and perf_counter() - began >= SECONDS:
                    break
                for number in sizes:
                    seconds = _time_pass(target, number, device)
                    times.seconds[number] = min(seconds, times.seconds.get(number, seconds))
    finally:
        cache.release([0])
    times.keys = sizes
    return times


def _time_pass(target: Target, number: int, device: torch.device) -> float:
    """Seconds of a pass over a chain of nodes on row 0."""
    draft = Draft.chains([0], [[0] * number], device=device)
    start = perf_counter()
    output, _ = target.score(draft, draft.get_plan())
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    assert output.logits is not None
    return perf_counter() - start
