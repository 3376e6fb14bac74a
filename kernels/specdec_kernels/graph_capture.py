"""Capture of a program as a CUDA graph, without side effects if the capture fails.

A program that waits for the device cannot be captured. Such a program is refused before the capture begins, with the
name of the operator that waits. A capture that fails for another reason restores streams, allocator and random
generators.

Tests: tests/launch/test_capture.py, tests/engine/cuda_graph/test_capture_safety.py, tests/gpu/test_capture.py.
"""

from __future__ import annotations

import gc
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, resolve_name

_WAITS = "called a synchronizing CUDA operation"
_TORCH = str(Path(torch.__file__).parent)
MAX_LISTED = 3
"""Most places in a program that an error names."""
_ONE_AT_A_TIME = threading.Lock()  # a capture first waits for its device, which would end a running capture


class HostReadError(RuntimeError):
    """A program waits for the device, so it cannot be captured."""


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Returns a context that makes a GPU the current device of streams, events and graphs. Other devices: no effect."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@contextmanager
def without_collection() -> Iterator[None]:
    """Keeps the garbage collector from running finalizers, whose operations would become part of a graph."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


_FAILED: list[torch.cuda.CUDAGraph] = []
"""Graphs whose capture failed. torch's allocator of pinned memory may still use their streams, so they stay alive."""


class GraphPool:
    """Streams and memory that several graphs of one device share. Such graphs must never run at the same time.

    torch requires one stream for all graphs that share memory. Its default stream for captures belongs to the device
    of the first capture in the process, so each pool has its own. Programs warm up on a second stream. A library
    therefore allocates its workspace for the capture in the memory of the graph.

    Args:
        device: The GPU of the graphs.
    """

    def __init__(self, device: torch.device) -> None:
        with on(device):
            self.memory = torch.cuda.graph_pool_handle()
            self.stream, self.warm_up = torch.cuda.Stream(), torch.cuda.Stream()

    def record(self, program: Callable[[], Any]) -> torch.cuda.CUDAGraph:
        """Captures one run of a program on the current device.

        Args:
            program: A callable that can be captured. Its return value is ignored.

        Returns:
            The graph.

        Raises:
            Exception: If the program or the capture fails. The current stream and the allocator are restored, and the
                pool is ready for the next capture.
        """
        graph, before, first = torch.cuda.CUDAGraph(), torch.cuda.current_stream(), None
        try:
            # other threads may allocate memory meanwhile
            with (
                without_collection(),
                torch.cuda.graph(graph, pool=self.memory, stream=self.stream, capture_error_mode="thread_local"),
            ):
                try:
                    program()
                except BaseException as error:
                    first = error  # the end of the capture raises too, with a less specific message
                    raise
        except BaseException as error:
            torch.cuda.set_stream(before)  # torch.cuda.graph leaves its stream only after a successful capture
            _FAILED.append(graph)
            self._replace_pool()
            raise (first or error) from None
        return graph

    def _replace_pool(self) -> None:
        """Ends the allocation to the pool of a failed capture, and takes a new pool.

        The old pool is not released. Some versions of torch have already released it, and a second release would free
        the memory of graphs that are still replayed.
        """
        with suppress(RuntimeError):  # raised if the allocation has ended already
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self.memory)
        self.memory = torch.cuda.graph_pool_handle()


def capture(program: Callable[[], None], device: torch.device, pool: GraphPool | None = None) -> Callable[[], None]:
    """Captures a program as a CUDA graph.

    Args:
        program: A callable without effects when it runs now. It runs twice before the capture, so that kernels are
            compiled and libraries initialised.
        device: Device of the program. Only GPUs capture.
        pool: Memory and stream shared with other graphs that never run at the same time. By default a new pool.

    Returns:
        The replay of the graph. On devices other than GPUs, the program itself.

    Raises:
        HostReadError: If the program waits for the device. The message names the operator and the line.
        Exception: If the program or the capture fails.
    """
    if device.type != "cuda":
        return program
    with _ONE_AT_A_TIME, on(device):
        pool = pool or GraphPool(device)
        before = torch.cuda.current_stream()
        pool.warm_up.wait_stream(before)
        try:
            with torch.cuda.stream(pool.warm_up):
                program()
                _refuse_waits(program)
                place = torch.zeros(1, device=device)
        finally:  # memory that the program wrote to may be returned to the former stream
            before.wait_stream(pool.warm_up)
        try:
            return pool.record(program).replay
        except BaseException:
            with suppress(RuntimeError):  # torch's generator stays in capture mode until another capture ends
                _FAILED.append(GraphPool(device).record(lambda: place.add_(1)))
            raise


def _refuse_waits(program: Callable[[], None]) -> None:
    """Runs a program. Raises HostReadError if it waits for the device and does so again in a second run."""
    with _recorded_waits() as waits:
        program()
    if not waits:
        return
    call, completed = _CurrentCall(), False
    with _recorded_waits(call) as named, call, suppress(Exception):  # a second, slow run finds the operators that wait
        program()
        completed = True
    if completed and not named:
        return  # the first run initialised a library or compiled code
    places = [*dict.fromkeys(named or waits)][:MAX_LISTED]
    raise HostReadError(f"the step waits for the device: {'; '.join(places)}")


class _CurrentCall(TorchFunctionMode):
    """Stores the torch function that runs and the line that called it, as "name at file:line"."""

    name = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.name
        self.name = f"{resolve_name(func) or getattr(func, '__name__', 'an operator')} at {_line(sys._getframe(1))}"
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.name = before


def _line(frame: Any) -> str:
    """Returns "file:line" of the nearest frame outside torch."""
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


@contextmanager
def _recorded_waits(call: _CurrentCall | None = None) -> Iterator[list[str]]:
    """Records the waits of this thread for a GPU during the block.

    torch could also raise at every wait. But that mode affects all threads, and threads that do not capture may wait.

    Args:
        call: Current torch function, if known. It gives the name of the operator.

    Yields:
        The recorded waits, as "operator at file:line".
    """
    found: list[str] = []
    own, mode = threading.get_ident(), torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("always", _WAITS)
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")  # shown once per process
        show = warnings.showwarning

        def record(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
            if threading.get_ident() != own or not str(message).startswith(_WAITS):
                show(message, category, filename, lineno, file, line)
            else:
                name = call.name if call is not None else ""
                found.append(name or f"an operator at {Path(filename).name}:{lineno}")

        warnings.showwarning = record
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(mode)
