"""What a trace of a GPU says about steps: kernels per step, busy time, and the gaps in which no kernel runs."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of trace events that run on the device."""
MOST_NAMES = 12


def reduced(events: Iterable[Mapping[str, Any]], steps: int) -> dict[str, Any] | None:
    """Reduces the events of a trace of several steps to numbers per step.

    Args:
        events: Trace events as `torch.profiler` exports them: "cat", "name", "ts" and "dur" in microseconds.
        steps: How many steps were traced.

    Returns:
        None without any kernel, else, per step:
        kernels: Kernels and copies.
        busy_us: Time in which at least one of them ran.
        gap_us: Time between the first and the last in which none ran.
        span_us: Both together.
        largest_gap_us: Of all steps.
        longest: Those that take most, by name, with count and microseconds.
    """
    ran = sorted((event for event in events if event.get("cat") in ON_DEVICE), key=lambda event: float(event["ts"]))
    if not ran:
        return None
    busy, largest, end = 0.0, 0.0, float(ran[0]["ts"])
    for event in ran:
        begin, finish = float(event["ts"]), float(event["ts"]) + float(event["dur"])
        largest = max(largest, begin - end)
        busy += max(0.0, finish - max(begin, end))  # kernels of several streams may overlap
        end = max(end, finish)
    span = end - float(ran[0]["ts"])
    names: dict[str, list[float]] = {}
    for event in ran:
        names.setdefault(str(event["name"]), []).append(float(event["dur"]))
    longest = sorted(names.items(), key=lambda each: -sum(each[1]))[:MOST_NAMES]
    return {
        "kernels": len(ran) / steps,
        "busy_us": busy / steps,
        "gap_us": (span - busy) / steps,
        "span_us": span / steps,
        "largest_gap_us": largest,
        "longest": [{"name": name, "count": len(each) / steps, "us": sum(each) / steps} for name, each in longest],
    }


def traced(step: Callable[[], Any], steps: int, device: torch.device) -> dict[str, Any] | None:
    """Runs so many steps under `torch.profiler`. Returns what `reduced` says, None on a CPU or without any kernel."""
    if device.type != "cuda":
        return None
    from torch.profiler import ProfilerActivity, profile, supported_activities

    seen = {ProfilerActivity.CUDA} & supported_activities() or {
        ProfilerActivity.CPU
    }  # a simulated GPU shows no kernels
    torch.cuda.synchronize(device)
    with profile(activities=seen) as profiler:
        for _ in range(steps):
            step()
        torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        return reduced(json.loads(file.read_text())["traceEvents"], steps)
