"""Times of operators on one device, beside what the device can do at all: copy, read and multiply, in the same run.

A call runs over and over on copies of its tensors that together exceed the last cache four times (see `copies`), so
that the cache does not flatter; where that cannot be, `Timing.cached` says so. On a GPU a captured graph holds these
calls, so that the host does not slow them down, and the tensors are made on the device.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

from ..dispatch.backend_request import use_backend
from ..dispatch.operator import REFERENCE
from ..dispatch.registry import OPS
from ..graph_capture import capture
from ..testing.agreement import SAMPLES, make_timed_sample, map_tensors, tensors_in
from ..testing.samples_attention import Call, Sizes, size_of

MOST_COPIES, MOST_HELD, MOST_HELD_CPU = 1024, 16 << 30, 384 << 20
"""Of the tensors of a call, and bytes of all copies together, on a GPU and on a CPU."""
CPU_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
ROUNDS = 50


@dataclass(frozen=True)
class Timing:
    """Microseconds of a call; rates count what it must read, write and multiply at least.

    Attributes:
        op, backend, sizes: What was called.
        microseconds: Median over the rounds, None where there is no time.
        p10, p90: Microseconds that a tenth of the rounds were below, and above.
        gigabytes_per_s, teraflops_per_s: Rates of the median.
        bytes, products: What the call must move and multiply at least.
        share: Of the device's measured copy rate, or of its rate of multiplication where that is the nearer limit.
        reason: Why there is no time.
        cached: The data lay in the last cache, so that the share may be more than all.
    """

    op: str
    backend: str
    sizes: str
    microseconds: float | None
    gigabytes_per_s: float | None = None
    teraflops_per_s: float | None = None
    share: float | None = None
    reason: str | None = None
    cached: bool = False
    p10: float | None = None
    p90: float | None = None
    bytes: int = 0
    products: int = 0


@dataclass(frozen=True)
class Spread:
    """Seconds of a call over the rounds: the median, and what a tenth of the rounds were below and above."""

    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, times: Sequence[float]) -> Spread:
        """Summarizes seconds of one round or more."""
        tenths = quantiles(times, n=10, method="inclusive") if len(times) > 1 else [times[0]] * 9
        return cls(median(times), tenths[0], tenths[-1])


@dataclass(frozen=True)
class Ceilings:
    """What the device did in this run: GB/s of a copy (read and write) and of a reading sum, TFLOP/s of a product."""

    copy: float
    read: float
    multiply: float


Peers = Callable[[str, torch.device, int, tuple[Sizes, ...]], Iterator[Timing]]
"""(op, device, rounds, shapes): times of what others do for that operator's calls."""


def find_peers(module: str) -> Peers:
    """`peers` of that module; the working folder is looked in too, as with `python -m`. Raises: ValueError."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found: Peers = import_module(module).peers
    except (ImportError, AttributeError) as error:
        wanted = "a module with peers(op, device, rounds, shapes), as benchmarks.kernels.gpu in the repository's folder"
        raise ValueError(f"kernels: got peers {module!r} ({error}); expected {wanted}") from error
    return found


def _call_all(calls: Sequence[Callable[[], Any]]) -> None:
    for call in calls:
        call()


def graph_times(sides: Mapping[str, Sequence[Callable[[], Any]]], rounds: int = ROUNDS) -> dict[str, Spread]:
    """Seconds per call of a captured graph of each side, which runs every one of its calls once; sides take turns."""
    device = torch.device("cuda", torch.cuda.current_device())
    replays = {name: capture(partial(_call_all, calls), device) for name, calls in sides.items()}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds + 3):
        for name, replay in replays.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            replay()
            end.record()
            end.synchronize()
            if turn >= 3:
                times[name].append(start.elapsed_time(end) / 1e3 / len(sides[name]))
    return {name: Spread.of(each) for name, each in times.items()}


def host_times(sides: Mapping[str, Sequence[Callable[[], Any]]], rounds: int = ROUNDS) -> dict[str, Spread]:
    """Seconds per call of each side, one call a round; sides take turns."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(-1, rounds):
        for name, calls in sides.items():
            start = time.perf_counter()
            calls[turn % len(calls)]()
            if turn >= 0:
                times[name].append(time.perf_counter() - start)
    return {name: Spread.of(each) for name, each in times.items()}


def seconds_of(device: torch.device, calls: Sequence[Callable[[], Any]], rounds: int) -> Spread:
    """Seconds per call on a device: of a captured graph on a GPU, by the host's clock elsewhere."""
    if device.type != "cuda":
        return host_times({"": calls}, rounds)[""]
    with torch.cuda.device(device):  # streams, events and graphs belong to it
        return graph_times({"": calls}, rounds)[""]


def cache_size(device: torch.device) -> int:
    """Bytes of the last cache: what a benchmark must not find its data in. 0 where nobody knows."""
    if device.type == "cpu":
        return _cpu_cache()
    if device.type != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


def _cpu_cache() -> int:
    """Bytes of the largest cache of the first core."""
    found = [0]
    for path in CPU_CACHES.glob("index*/size"):  # "32768K"
        number, unit = path.read_text().strip()[:-1], path.read_text().strip()[-1:]
        if number.isdigit() and unit in "KMG":
            found.append(int(number) << {"K": 10, "M": 20, "G": 30}[unit])
    return max(found)


def measure_ceilings(device: torch.device, rounds: int = 10, tiny: bool = False) -> Ceilings:
    """Copy, read and matrix product of this device, now. On a CPU, which others use too, the best of the rounds.

    The numbers are random: zeros take less power, so that clocks stay higher, and may be compressed on the way.

    Args:
        device: What is measured.
        rounds: Timed rounds.
        tiny: For rehearsals: on few numbers, whatever the device.
    """
    gpu = device.type == "cuda"

    def seconds(call: Callable[[], Any]) -> float:
        if gpu:
            return seconds_of(device, [call], rounds).median
        return min(seconds_of(device, [call], 1).median for _ in range(rounds))

    count = (
        2**28 if gpu else min(max(2**23, cache_size(device)), 2**25)
    )  # float32: four times the cache, if it is small
    side, dtype = (8192, torch.bfloat16) if gpu else (512, torch.float32)
    if tiny:
        count, side = 2**16, 64
    one, other = (torch.randn(count, dtype=torch.float32, device=device) for _ in range(2))
    size = count * 4
    copied = seconds(lambda: other.copy_(one))
    read = seconds(lambda: one.sum())
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(left)
    multiplied = seconds(lambda: torch.mm(left, right, out=product))
    return Ceilings(2 * size / copied / 1e9, size / read / 1e9, 2 * side**3 / multiplied / 1e12)


def describe(op: str, sizes: Sizes) -> str:
    """The sizes an operator looks at, in words."""
    each = {name: getattr(sizes, name) for name in SAMPLES[op].names}
    return " ".join(f"{name}={str(value).removeprefix('torch.')}" for name, value in each.items())


def copies(op: str, sizes: Sizes, device: torch.device) -> list[Call]:
    """Calls on tensors of their own that read and write at least four times the size of the last cache, as far as
    MOST_COPIES (a call that touches so little is bound by its launches) and MOST_HELD allow. On a CPU copies that are
    too few for that are not made.
    """
    with use_backend():
        first = make_timed_sample(device, op, sizes)
    held = max(1, size_of(*tensors_in((first.arguments, tuple(first.options.values())))))
    wanted = 4 * cache_size(device) // max(1, first.bytes) + 1
    most = min(MOST_COPIES, max(1, (MOST_HELD if device.type == "cuda" else MOST_HELD_CPU) // held))
    count = min(wanted, most) if device.type == "cuda" or wanted <= most else 1
    return [first, *(map_tensors(first, torch.clone) for _ in range(count - 1))]


def in_cache(calls: Sequence[Call], device: torch.device) -> bool:
    """Whether these calls find their data in the last cache, so that a rate says nothing about memory."""
    return len(calls) * calls[0].bytes < 4 * cache_size(device)


def shapes_of(op: str, device: torch.device) -> tuple[Sizes, ...]:
    """The shapes of an operator that are timed on a device."""
    return SAMPLES[op].gpu if device.type == "cuda" and SAMPLES[op].gpu else (Sizes(),)


def bench(
    ops: list[str],
    device: torch.device,
    sizes: Sizes | None = None,
    rounds: int = ROUNDS,
    ceilings: Ceilings | None = None,
    peers: Peers | None = None,
) -> Iterator[Timing]:
    """Times of all backends of the operators, and of peers; sizes: what to time, else the shapes of `SAMPLES`.

    The calls are those that an engine makes: see `Sample.timed`.
    """
    limit = ceilings or measure_ceilings(device)
    for op in ops:
        for shape in (sizes,) if sizes is not None else shapes_of(op, device):
            calls = copies(op, shape, device)
            for backend in OPS[op].backends:
                yield _time_backend(op, backend.name, shape, device, calls, rounds, limit)
            if peers is not None:
                del calls  # peers make their own
                yield from peers(op, device, rounds, (shape,))


def _time_backend(
    op: str, backend: str, sizes: Sizes, device: torch.device, calls: list[Call], rounds: int, limit: Ceilings
) -> Timing:
    words = describe(op, sizes)
    with use_backend(backend):
        rows = OPS[op].explain(*calls[0].arguments, **calls[0].options)
        reason = next(row.reason for row in rows if row.backend == backend)
        if reason is None and backend == REFERENCE and device.type == "cuda":
            reason = "the reference asks the device for numbers: no graph"
        if (
            reason is None
            and op in ("recursive_rejection_thresholds", "traversal_thresholds")
            and device.type == "cuda"
        ):
            reason = "for inspection: it asks the device how deep the trees are, so no graph"
        if reason is not None:
            return Timing(op, backend, words, None, reason=reason)
        run = [call.repeatable(OPS[op]) for call in calls]
        try:
            spread = seconds_of(device, run, rounds)
        except Exception as error:  # one kernel that fails leaves the others their times
            first = next(iter(str(error).splitlines()), "")
            return Timing(op, backend, words, None, reason=f"{type(error).__name__}: {first}")
    return make_timing(op, backend, words, calls, spread, limit, device)


def make_timing(
    op: str,
    backend: str,
    words: str,
    calls: Sequence[Call],
    spread: Spread,
    limit: Ceilings | None,
    device: torch.device,
) -> Timing:
    """A `Timing` of these calls, with rates and, where the limit is known, the share of it."""
    rate, flops = calls[0].bytes / spread.median / 1e9, calls[0].products * 2 / spread.median / 1e12
    return Timing(
        op,
        backend,
        words,
        spread.median * 1e6,
        rate,
        flops if calls[0].products else None,
        max(rate / limit.copy, flops / limit.multiply) if limit else None,
        cached=in_cache(calls, device),
        p10=spread.p10 * 1e6,
        p90=spread.p90 * 1e6,
        bytes=calls[0].bytes,
        products=calls[0].products,
    )
