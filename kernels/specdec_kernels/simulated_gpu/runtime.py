"""The API of torch.cuda on simulated GPUs: devices, streams, events and graphs, with CUDA's rules of capture."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from .records import SHARED_MEMORY
from .state import Gpu, on_the_device

PROCESSORS = 132
"""Streaming multiprocessors of a simulated GPU."""
_NUMBERS = count(1)


class Stream:
    """A stream; handle 0 is the default stream of its device."""

    gpu: Gpu

    def __init__(self, device: Any = None, priority: int = 0, *, handle: int | None = None) -> None:
        self.device_index = self.gpu.index(device)
        self.device = torch.device("cuda", self.device_index)
        self.stream_id = self.cuda_stream = next(_NUMBERS) * 64 if handle is None else handle

    def __eq__(self, other: object) -> bool:
        mine = (self.device_index, self.stream_id)
        return isinstance(other, Stream) and mine == (other.device_index, other.stream_id)

    def __hash__(self) -> int:
        return hash((self.device_index, self.stream_id))

    def wait_stream(self, stream: Stream) -> None:
        """Makes later work wait for the other stream, whose work is done already."""

    def wait_event(self, event: Event) -> None:
        """Makes later work wait for an event, which has happened already."""

    def record_event(self, event: Event | None = None) -> Event:
        """Records an event, a new one by default."""
        made = event or Event()
        made.record(self)
        return made

    def synchronize(self) -> None:
        """Waits for the stream."""
        self.gpu.wait("Stream.synchronize")

    def query(self) -> bool:
        """Returns whether all work is done."""
        return True


class Event:
    """An event. Its time is the host time of its recording."""

    gpu: Gpu

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self._time = 0.0

    def record(self, stream: Stream | None = None) -> None:
        """Marks a place in a stream."""
        self._time = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        """Makes a stream wait for the event."""

    def synchronize(self) -> None:
        """Waits for the event, not for later launches."""
        self.gpu.wait("Event.synchronize", record=False)
        self.gpu.events_awaited += 1

    def query(self) -> bool:
        """Returns whether the event has happened."""
        return True

    def elapsed_time(self, end: Event) -> float:
        """Returns milliseconds between two events."""
        return max((end._time - self._time) * 1e3, 1e-6)


class Graph:
    """torch.cuda.CUDAGraph: the work between `capture_begin` and `capture_end`, replayed on the same memory.

    Attributes:
        stream: Stream whose work is captured.
        mode: Capture error mode.
        invalid: Whether an operation was not permitted in a capture.
        work: Functions that a replay calls, in order.
        kernels: Names of the captured Triton kernels, in order.
        operators: Number of captured torch operators, by name.
        replays: Number of replays.
    """

    gpu: Gpu

    def __init__(self, keep_graph: bool = False) -> None:
        self.stream: Stream | None = None
        self.mode, self.invalid, self.replays = "", False, 0
        self.work: list[Callable[[], None]] = []
        self.kernels: list[str] = []
        self.operators: Counter[str] = Counter()
        self._before: tuple[int, Counter[str]] = (0, Counter())
        self._pool: Any = None
        self._complete = False

    def capture_begin(
        self, pool: Any = None, capture_error_mode: str = "global", check_input_liveness: bool = False
    ) -> None:
        """Begins to capture the work of the current stream. Raises RuntimeError in the same cases as torch."""
        gpu, stream = self.gpu, self.gpu.streams[self.gpu.current]
        if stream.stream_id == 0:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        if capture_error_mode not in ("global", "thread_local", "relaxed"):
            raise RuntimeError(f"Unknown capture error mode. Expected `global`, ..., got {capture_error_mode}")
        if any(graph.stream == stream for graph in gpu.capturing):
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        self._pool = pool if pool is not None else object()
        if self._pool in gpu.recording_pools:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        gpu.recording_pools.add(self._pool)
        self.stream, self.mode = stream, capture_error_mode
        self._before = len(gpu.launches), gpu.operators.copy()
        gpu.capturing.append(self)
        gpu.captures.append(self)

    def capture_end(self) -> None:
        """Ends the capture. Raises RuntimeError if it became invalid; its pool then stays in recording."""
        gpu = self.gpu
        if self.stream != gpu.streams[gpu.current]:
            raise RuntimeError("Capture must end on the same stream it began on.")
        gpu.capturing.remove(self)
        if self.invalid:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        gpu.recording_pools.discard(self._pool)
        self.kernels = [launch.kernel for launch in gpu.launches[self._before[0] :]]
        self.operators = gpu.operators - self._before[1]
        self._complete = True

    def replay(self) -> None:
        """Repeats the captured work on the same memory. Raises RuntimeError for a graph without a capture."""
        if not self._complete:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        self.replays += 1
        with on_the_device():
            for work in self.work:
                work()

    def reset(self) -> None:
        """Deletes the captured work."""
        self.work, self._complete = [], False

    def pool(self) -> Any:
        """Returns the memory pool."""
        return self._pool


def _properties(gpu: Gpu) -> SimpleNamespace:
    major, minor = gpu.capability
    shared = SHARED_MEMORY[gpu.architecture]
    return SimpleNamespace(
        name=f"simulated {gpu.architecture}", major=major, minor=minor, total_memory=80 << 30,
        multi_processor_count=PROCESSORS, shared_memory_per_block=49_152, shared_memory_per_block_optin=shared,
        shared_memory_per_multiprocessor=shared + 1024, L2_cache_size=50 << 20, max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65_536, warp_size=32, is_integrated=0, is_multi_gpu_board=0, gcnArchName="", uuid="0",
    )  # fmt: skip


class _Runtime:
    """Functions of torch.cuda."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu, self._handles = gpu, count(1)

    def exchange_device(self, index: int) -> int:
        """Makes a device the current one and returns the former one. A negative index changes nothing."""
        former = self._gpu.current
        if index >= 0:
            if index >= self._gpu.devices:
                raise RuntimeError("CUDA error: invalid device ordinal")
            self._gpu.current = index
        return former

    def set_device(self, device: Any) -> None:
        """Makes a device the current one."""
        self.exchange_device(self._gpu.index(device))

    def current_stream(self, device: Any = None) -> Stream:
        """Returns the current stream of a device."""
        return self._gpu.streams[self._gpu.index(device)]

    def set_stream(self, stream: Stream) -> None:
        """Makes a stream the current one of its device, and that device the current one."""
        self._gpu.current = stream.device_index
        self._gpu.streams[stream.device_index] = stream

    def synchronize(self, device: Any = None) -> None:
        """Waits for a device."""
        self._gpu.wait("synchronize")

    def empty_cache(self) -> None:
        """Releases unused memory. Raises RuntimeError during a capture."""
        if self._gpu.capturing:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing (empty_cache)")

    def graph_pool_handle(self) -> tuple[int, int]:
        """Returns a new memory pool."""
        return (0, next(self._handles))

    def set_sync_debug_mode(self, mode: int | str) -> None:
        """Sets the reaction to waits of the host: "default", "warn" or "error"."""
        self._gpu.sync_mode = {"default": 0, "warn": 1, "error": 2}[mode] if isinstance(mode, str) else mode

    def end_allocate_to_pool(self, device: int, pool: Any) -> None:
        """Ends the allocation to a pool."""
        self._gpu.recording_pools.discard(pool)

    def names(self) -> dict[str, Any]:
        """Returns the replacements for attributes of torch.cuda, by name."""
        gpu, found = self._gpu, _properties(self._gpu)
        classes = {name: type(name, (base,), {"gpu": gpu}) for name, base in
                   (("Stream", Stream), ("Event", Event), ("CUDAGraph", Graph))}  # fmt: skip
        for device in range(gpu.devices):
            gpu.streams[device] = classes["Stream"](device, handle=0)
        memory = {"allocated_bytes.all.current": 0, "allocation.all.allocated": 0}
        return {
            **classes,
            "_lazy_init": lambda: None,
            "init": lambda: None,
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "device_count": lambda: gpu.devices,
            "current_device": lambda: gpu.current,
            "set_device": self.set_device,
            "_exchange_device": self.exchange_device,
            "_maybe_exchange_device": self.exchange_device,
            "get_device_properties": lambda device=None: found,
            "get_device_name": lambda device=None: found.name,
            "get_device_capability": lambda device=None: gpu.capability,
            "get_arch_list": lambda: [gpu.architecture],
            "current_stream": self.current_stream,
            "default_stream": lambda device=None: classes["Stream"](device, handle=0),
            "set_stream": self.set_stream,
            "synchronize": self.synchronize,
            "empty_cache": self.empty_cache,
            "graph_pool_handle": self.graph_pool_handle,
            "is_current_stream_capturing": lambda: gpu.graph_of(gpu.current) is not None,
            "set_sync_debug_mode": self.set_sync_debug_mode,
            "get_sync_debug_mode": lambda: gpu.sync_mode,
            "memory_stats": lambda device=None: dict(memory),
            "memory_allocated": lambda device=None: 0,
            "max_memory_allocated": lambda device=None: 0,
            "reset_peak_memory_stats": lambda device=None: None,
            "mem_get_info": lambda device=None: (found.total_memory, found.total_memory),
            "is_bf16_supported": lambda including_emulation=True: True,
            "manual_seed": lambda seed: None,
            "manual_seed_all": lambda seed: None,
        }


@contextmanager
def installed(gpu: Gpu) -> Iterator[None]:
    """Simulates torch.cuda for the duration of the block.

    Args:
        gpu: The simulated GPUs.

    Yields:
        Nothing.
    """
    runtime = _Runtime(gpu)
    internals = {
        "_host_emptyCache": lambda: None,
        "_cuda_endAllocateToPool": runtime.end_allocate_to_pool,
        "_cuda_releasePool": lambda device, pool: None,
    }
    with ExitStack() as stack:
        for name, value in runtime.names().items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        for name, value in internals.items():
            stack.enter_context(patch.object(torch._C, name, value, create=True))
        stack.enter_context(patch.object(torch.cuda.graphs.graph, "default_capture_stream", None))
        yield
