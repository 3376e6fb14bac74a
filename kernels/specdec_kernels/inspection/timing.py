"""Times of operators on one device, beside the device's copy, read and multiplication rates from the same run.

A call runs repeatedly on copies of its tensors. Together the copies are four times as large as the last-level cache
(see `copies`), so data come from memory. If that is impossible, `Timing.cached` is True. On a GPU the calls run in a
captured graph without host overhead, and their tensors are allocated on the device.
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

MAX_COPIES, MAX_BYTES_GPU, MAX_BYTES_CPU = 1024, 16 << 30, 384 << 20
"""Most copies of a call's tensors, and most bytes of all copies together, on a GPU and on a CPU."""
CPU_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
ROUNDS = 50


@dataclass(frozen=True)
class Timing:
    """Time of a call. Rates count the bytes and multiplications that the call needs at least.

    Attributes:
        op: Name of the operator.
        backend: Name of the backend or peer.
        sizes: Sizes of the sample, as text.
        microseconds: Median over the rounds; None if there is no time.
        gigabytes_per_s: Memory rate at the median.
        teraflops_per_s: Arithmetic rate at the median; None without multiplications.
        share: Fraction of the device's measured memory rate or multiplication rate, whichever is larger.
        reason: Why there is no time.
        cached: Whether the data fit in the last-level cache, so that `share` may exceed 1.
        p10: 10th percentile over the rounds, in microseconds.
        p90: 90th percentile over the rounds, in microseconds.
        bytes: Bytes that the call must read and write at least.
        products: Multiplications that the call needs at least.
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
    """Seconds of a call over the rounds: median, 10th and 90th percentile."""

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
    """Rates of the device in this run: GB/s of a copy (read and write) and of a sum, TFLOP/s of a matrix product."""

    copy: float
    read: float
    multiply: float

    @property
    def memory(self) -> float:
        """GB/s: the faster of copy and sum. On an H200 a copy in a CUDA graph reaches two thirds of the sum's rate."""
        return max(self.copy, self.read)


Peers = Callable[[str, torch.device, int, tuple[Sizes, ...]], Iterator[Timing]]
"""Function of (op, device, rounds, shapes) that yields times of other implementations of that operator's calls."""


def find_peers(module: str) -> Peers:
    """Imports the function `peers` of a module. As with `python -m`, the working folder is searched too.

    Args:
        module: Name of the module.

    Returns:
        The function.

    Raises:
        ValueError: If the module cannot be imported or has no such function.
    """
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
    """Returns seconds per call. A captured graph per side runs each of its calls once; sides alternate."""
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
    """Returns seconds per call, one call per side and round; sides alternate."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(-1, rounds):
        for name, calls in sides.items():
            start = time.perf_counter()
            calls[turn % len(calls)]()
            if turn >= 0:
                times[name].append(time.perf_counter() - start)
    return {name: Spread.of(each) for name, each in times.items()}


def seconds_of(device: torch.device, calls: Sequence[Callable[[], Any]], rounds: int) -> Spread:
    """Returns seconds per call: of a captured graph on a GPU, by the host clock on other devices."""
    if device.type != "cuda":
        return host_times({"": calls}, rounds)[""]
    with torch.cuda.device(device):  # streams, events and graphs belong to it
        return graph_times({"": calls}, rounds)[""]


def cache_size(device: torch.device) -> int:
    """Returns the bytes of the last-level cache, or 0 if unknown. Benchmark data must not fit in it."""
    if device.type == "cpu":
        return _cpu_cache()
    if device.type != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


def _cpu_cache() -> int:
    """Returns the bytes of the largest cache of the first core."""
    found = [0]
    for path in CPU_CACHES.glob("index*/size"):  # "32768K"
        number, unit = path.read_text().strip()[:-1], path.read_text().strip()[-1:]
        if number.isdigit() and unit in "KMG":
            found.append(int(number) << {"K": 10, "M": 20, "G": 30}[unit])
    return max(found)


def measure_ceilings(device: torch.device, rounds: int = 10, tiny: bool = False) -> Ceilings:
    """Measures the copy, read and multiplication rates of a device.

    The numbers are random. Zeros take less power, which keeps clocks higher, and memory may compress them. A CPU is
    shared with other processes, so its best round counts.

    Args:
        device: Device to measure.
        rounds: Number of timed rounds.
        tiny: Whether to use few numbers on any device, for rehearsals.

    Returns:
        The rates.
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
    """Returns the sizes that an operator depends on, as text."""
    each = {name: getattr(sizes, name) for name in SAMPLES[op].names}
    return " ".join(f"{name}={str(value).removeprefix('torch.')}" for name, value in each.items())


def copies(op: str, sizes: Sizes, device: torch.device, most_copies: int = MAX_COPIES) -> list[Call]:
    """Makes calls on separate tensors that together access four times the size of the last-level cache.

    `most_copies` and the largest number of bytes limit the calls. A call that needs more copies than MAX_COPIES is
    limited by its launches. On a CPU there is one call if the limits permit too few.

    Args:
        op: Name of the operator.
        sizes: Sizes of the sample.
        device: Device of the tensors.
        most_copies: Largest number of calls.

    Returns:
        One call or more.
    """
    with use_backend():
        first = make_timed_sample(device, op, sizes)
    held = max(1, size_of(*tensors_in((first.arguments, tuple(first.options.values())))))
    wanted = 4 * cache_size(device) // max(1, first.bytes) + 1
    most = min(most_copies, max(1, (MAX_BYTES_GPU if device.type == "cuda" else MAX_BYTES_CPU) // held))
    count = min(wanted, most) if device.type == "cuda" or wanted <= most else 1
    return [first, *(map_tensors(first, torch.clone) for _ in range(count - 1))]


def in_cache(calls: Sequence[Call], device: torch.device) -> bool:
    """Returns whether the data of these calls fit in the last-level cache, so rates do not show memory."""
    return len(calls) * calls[0].bytes < 4 * cache_size(device)


def shapes_of(op: str, device: torch.device) -> tuple[Sizes, ...]:
    """Returns the shapes that are timed on a device."""
    return SAMPLES[op].gpu if device.type == "cuda" and SAMPLES[op].gpu else (Sizes(),)


def bench(
    ops: list[str],
    device: torch.device,
    sizes: Sizes | None = None,
    rounds: int = ROUNDS,
    ceilings: Ceilings | None = None,
    peers: Peers | None = None,
    most_copies: int = MAX_COPIES,
) -> Iterator[Timing]:
    """Times all backends of operators, and their peers, on the calls that an engine makes (see `Sample.timed`).

    Args:
        ops: Names of the operators.
        device: Device of the calls.
        sizes: Sizes of the calls; by default the shapes of `SAMPLES`.
        rounds: Number of timed rounds.
        ceilings: Rates of the device; measured by default.
        peers: Times other implementations; see `find_peers`.
        most_copies: Most copies of a call's tensors; see `copies`.

    Yields:
        One `Timing` per operator, shape and backend or peer.
    """
    limit = ceilings or measure_ceilings(device)
    for op in ops:
        for shape in (sizes,) if sizes is not None else shapes_of(op, device):
            calls = copies(op, shape, device, most_copies)
            for backend in OPS[op].backends:
                yield _time_backend(op, backend.name, shape, device, calls, rounds, limit)
            if peers is not None:
                del calls  # peers make their own calls
                yield from peers(op, device, rounds, (shape,))


def _time_backend(
    op: str, backend: str, sizes: Sizes, device: torch.device, calls: list[Call], rounds: int, limit: Ceilings
) -> Timing:
    """Times one backend on one shape, or says why there is no time."""
    words = describe(op, sizes)
    with use_backend(backend):
        rows = OPS[op].explain(*calls[0].arguments, **calls[0].options)
        reason = next(row.reason for row in rows if row.backend == backend)
        if reason is None and backend == REFERENCE and device.type == "cuda":
            reason = "the reference reads values of the device, so no graph can capture it"
        if (
            reason is None
            and op in ("recursive_rejection_thresholds", "traversal_thresholds")
            and device.type == "cuda"
        ):
            reason = "for inspection only; it reads the depth of the trees from the device, so no graph can capture it"
        if reason is not None:
            return Timing(op, backend, words, None, reason=reason)
        run = [call.repeatable(OPS[op]) for call in calls]
        try:
            spread = seconds_of(device, run, rounds)
        except Exception as error:  # reported; the other kernels are still timed
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
    """Returns the `Timing` of these calls, with rates and, if the limit is known, the share of it."""
    rate, flops = calls[0].bytes / spread.median / 1e9, calls[0].products * 2 / spread.median / 1e12
    return Timing(
        op,
        backend,
        words,
        spread.median * 1e6,
        rate,
        flops if calls[0].products else None,
        max(rate / limit.memory, flops / limit.multiply) if limit else None,
        cached=in_cache(calls, device),
        p10=spread.p10 * 1e6,
        p90=spread.p90 * 1e6,
        bytes=calls[0].bytes,
        products=calls[0].products,
    )
