"""Capture of a program as a CUDA graph, and what is left behind when it fails: nothing.

A program that asks the device for something cannot be captured. That is found before the capture begins, with the
operator that asked. A capture that fails all the same leaves streams, allocator and random generators as they were.
Tests: tests/launch/test_capture.py, tests/engine/cuda_graph/test_capture_safety.py, tests/gpu/test_capture.py.
"""

from __future__ import annotations

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
MOST_TOLD = 3
"""Places of a program that an error names."""
_ONE_AT_A_TIME = threading.Lock()  # a capture begins by waiting for its device, which would end another one's


class HostReadError(RuntimeError):
    """A program asks the device for something and so cannot be captured."""


def on(device: torch.device) -> AbstractContextManager[Any]:
    """That GPU as the current one: streams, events and graphs belong to it. Nothing on other devices."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


_FAILED: list[torch.cuda.CUDAGraph] = []
"""Graphs whose capture failed, kept because torch's allocator of pinned memory may still ask them for their stream."""


class GraphPool:
    """The streams and the memory of graphs of one device that never run at the same time.

    torch wants one stream for all graphs that share memory. Its default stream for captures belongs to the device of
    the first capture in the process. Programs warm up on a stream of their own, so that a library takes its workspace
    of a capture from the memory of the graph.

    Args:
        device: A GPU.
    """

    def __init__(self, device: torch.device) -> None:
        with on(device):
            self.memory = torch.cuda.graph_pool_handle()
            self.stream, self.warm_up = torch.cuda.Stream(), torch.cuda.Stream()

    def record(self, program: Callable[[], Any]) -> torch.cuda.CUDAGraph:
        """Captures one run of a program on the current device.

        Args:
            program: A callable that can be captured. What it returns is ignored.

        Returns:
            The graph.

        Raises:
            Exception: What the program raised, or what CUDA said about it. The stream and the allocator are as before
                and the pool is ready for the next capture.
        """
        graph, before, first = torch.cuda.CUDAGraph(), torch.cuda.current_stream(), None
        try:
            # other threads may allocate memory meanwhile
            with torch.cuda.graph(graph, pool=self.memory, stream=self.stream, capture_error_mode="thread_local"):
                try:
                    program()
                except BaseException as error:
                    first = error  # the end of the capture raises too, and says less
                    raise
        except BaseException as error:
            torch.cuda.set_stream(before)  # torch.cuda.graph leaves its stream only when the capture ended well
            _FAILED.append(graph)
            self._give_up()
            raise (first or error) from None
        return graph

    def _give_up(self) -> None:
        """Ends the allocation to the pool, where the end of the capture did not get so far, and takes a new pool.

        The pool is not released. Versions of torch differ in whether they have released it, and one release too many
        would free the memory of graphs that are still replayed.
        """
        with suppress(RuntimeError):  # raised where the allocation has ended
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self.memory)
        self.memory = torch.cuda.graph_pool_handle()


def capture(program: Callable[[], None], device: torch.device, pool: GraphPool | None = None) -> Callable[[], None]:
    """Captures a program as a CUDA graph.

    Args:
        program: Changes nothing when it runs now. It runs twice before the capture, so that kernels are compiled and
            libraries awake.
        device: Where it runs. On other devices than a GPU nothing is captured.
        pool: Memory and stream of graphs that never run at the same time; by default its own.

    Returns:
        The replay of the graph; the program itself on other devices.

    Raises:
        HostReadError: If the program asks the device for something; the message names the operator and the line.
        Exception: What the program raised, or what CUDA said about its capture.
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
        finally:  # memory that the program wrote to may be given back to the stream before
            before.wait_stream(pool.warm_up)
        try:
            return pool.record(program).replay
        except BaseException:
            with suppress(RuntimeError):  # torch's generator stays in capture mode until another capture ends
                _FAILED.append(GraphPool(device).record(lambda: place.add_(1)))
            raise


def _refuse_waits(program: Callable[[], None]) -> None:
    """Runs a program. Raises HostReadError where it waits for the device, and would do so again."""
    with _recorded_waits() as waits:
        program()
    if not waits:
        return
    call, whole = _CurrentCall(), False
    with _recorded_waits(call) as named, call, suppress(Exception):  # once more, slowly: this run tells what asks
        program()
        whole = True
    if whole and not named:
        return  # a library awoke in the run before, or code was compiled
    told = [*dict.fromkeys(named or waits)][:MOST_TOLD]
    raise HostReadError(f"the step asks the device for something: {'; '.join(told)}")


class _CurrentCall(TorchFunctionMode):
    """Knows which function of torch runs, and the line that called it: "name at file:line"."""

    name = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.name
        self.name = f"{resolve_name(func) or getattr(func, '__name__', 'an operator')} at {_line(sys._getframe(1))}"
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.name = before


def _line(frame: Any) -> str:
    """The nearest line on the stack that is not torch's."""
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


@contextmanager
def _recorded_waits(call: _CurrentCall | None = None) -> Iterator[list[str]]:
    """What makes this thread wait for a GPU: the operator, where it is known, and the line that called it.

    torch can also raise there. That would hold for all threads, and those that do not capture may wait.
    """
    found: list[str] = []
    own, mode = threading.get_ident(), torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("always", _WAITS)
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")  # said once in a process
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
