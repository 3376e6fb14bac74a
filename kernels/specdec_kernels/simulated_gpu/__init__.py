"""A stand-in for GPUs: programs run as on a CUDA device, without one.

Inside `gpu(...)` the API of `torch.cuda` answers, tensors lie on "cuda:0", "cuda:1", ..., and Triton's active driver is
a stand-in. Each part does what the real one does between a Python call and the machine code:

- Tensors (`tensors.py`, `methods.py`) carry a CUDA device and keep their numbers on the CPU. Reads of the host and
  uploads from pageable memory are recorded. Operators that mix devices raise, as on a GPU.
- Streams, events, graphs and device properties (`runtime.py`) follow CUDA's rules. A captured graph replays the
  operators that were recorded, on the same memory.
- A Triton launch (`launches.py`) binds and specialises its arguments, checks the globals of the kernel and compiles it.
  Grid, block, shared memory, device and stream are checked. The kernel does not run.
- The CPU backend of the operator then writes the true results (`launch_results.py`), so an engine generates its
  true text.

Values of kernels are tested in Triton's interpreter and resources in compiled code; the stand-in covers what lies
between the call and the kernel. It is kinder than CUDA in these ways, so a fault of these kinds passes:

- Work is done at once. Reads without waiting for an event, and streams that do not wait for each other, give right
  numbers.
- A graph keeps the memory alive that it reads, and graphs that share a pool do not overwrite each other's results.
- A capture does its work once. A program must change nothing when it is captured.
- Only the results of operators of this package are true. Other kernels, and those between the launches of one operator,
  write nothing.
Tests: tests/launch/.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from .records import SHARED_MEMORY, HostRead, Launch, LaunchError, Upload
from .state import Gpu

__all__ = ["SHARED_MEMORY", "Gpu", "HostRead", "Launch", "LaunchError", "Upload", "gpu", "unavailable_reason"]


def unavailable_reason() -> str | None:
    """Returns why there can be no stand-in here, or None."""
    import torch

    from ..inspection import machine_code

    if hasattr(torch.cuda.CUDAGraph, "gpu"):
        return "one is in place already: blocks do not nest"
    if torch.cuda.is_available():
        return "a CUDA device is present: the stand-in would hide it"
    return machine_code.unavailable_reason()


@contextmanager
def gpu(
    architecture: str = "sm_90", devices: int = 1, answers: bool = True, make_driver: Callable[[Gpu], Any] | None = None
) -> Iterator[Gpu]:
    """Puts stand-in GPUs in place of CUDA devices for the duration of the block.

    Args:
        architecture: What kernels are compiled for: "sm_80", "sm_86", "sm_89", "sm_90", "sm_100" or "sm_120".
        devices: Number of GPUs.
        answers: Whether operators give their true results after a launch. Without, results are what the memory held.
        make_driver: Makes a driver of Triton's that launches what was compiled. By default nothing is launched.

    Yields:
        The record of what happened: launches, compiled kernels, host reads, uploads, torch operators, captures.

    Raises:
        ValueError: For an unknown architecture or no devices.
        RuntimeError: If there can be no stand-in here (`unavailable_reason` says why), or one is in place already.
    """
    from . import launch_results, launches, methods, runtime

    reason = unavailable_reason()
    if reason is not None:
        raise RuntimeError(f"standin: {reason}")
    made = Gpu(architecture, devices)
    with ExitStack() as stack:
        stack.enter_context(runtime.installed(made))
        stack.enter_context(launches.installed(made, make_driver))
        stack.enter_context(launch_results.installed(made, answers))
        stack.enter_context(methods.installed(made, launch_results.dispatched))
        yield made
