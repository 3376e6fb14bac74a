"""Simulated GPUs: programs run as on a CUDA device, without one.

Inside `gpu(...)`, `torch.cuda` and Triton's driver are simulated, and tensors have devices "cuda:0", "cuda:1" and so
on. Each part reproduces what happens between a Python call and the machine code:

- Tensors (`tensors.py`, `methods.py`) carry a CUDA device and keep their numbers on the CPU. Host reads and uploads
  from pageable memory are recorded. Operators that mix devices raise, as on a GPU.
- Streams, events, graphs and device properties (`runtime.py`) follow CUDA's rules. A captured graph replays the
  recorded operators on the same memory.
- A Triton launch (`launches.py`) binds and specialises its arguments, checks the globals of the kernel and compiles it.
  Grid, block, shared memory, device and stream are checked. The kernel does not run.
- The CPU backend of the operator then writes the true results (`launch_results.py`). So an engine generates the same
  text as on a GPU.

Other tests cover the rest: Triton's interpreter checks the values of kernels, and compiled code shows their resources.
The simulation is more lenient than CUDA and does not detect these faults:

- All work is done at once. A read that does not wait for its event, or streams that do not wait for each other, give
  right numbers.
- A graph keeps the memory alive that it reads. Graphs that share a pool do not overwrite each other's results.
- A capture runs its program once. A program must change nothing when it is captured.
- Only operators of this package write true results. Other kernels, and those between the launches of one operator,
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
    """Returns why no GPU can be simulated here, or None."""
    import torch

    from ..inspection import machine_code

    if hasattr(torch.cuda.CUDAGraph, "gpu"):
        return "a GPU is simulated already; blocks do not nest"
    if torch.cuda.is_available():
        return "a CUDA device is present; the simulation would hide it"
    return machine_code.unavailable_reason()


@contextmanager
def gpu(
    architecture: str = "sm_90",
    devices: int = 1,
    true_results: bool = True,
    make_driver: Callable[[Gpu], Any] | None = None,
) -> Iterator[Gpu]:
    """Simulates CUDA devices for the duration of the block.

    Args:
        architecture: Target of compiled kernels: "sm_80", "sm_86", "sm_89", "sm_90", "sm_100" or "sm_120".
        devices: Number of GPUs.
        true_results: Whether the CPU backend writes an operator's true results after a launch. If not, results keep
            the previous contents of their memory.
        make_driver: Creates a Triton driver that launches compiled kernels. By default nothing is launched.

    Yields:
        The record of launches, compiled kernels, host reads, uploads, torch operators and captures.

    Raises:
        ValueError: For an unknown architecture or no devices.
        RuntimeError: If no GPU can be simulated here; see `unavailable_reason`.
    """
    from . import launch_results, launches, methods, runtime

    reason = unavailable_reason()
    if reason is not None:
        raise RuntimeError(f"simulated_gpu: {reason}")
    made = Gpu(architecture, devices)
    with ExitStack() as stack:
        stack.enter_context(runtime.installed(made))
        stack.enter_context(launches.installed(made, make_driver))
        stack.enter_context(launch_results.installed(made, true_results))
        stack.enter_context(methods.installed(made, launch_results.run_dispatched))
        yield made
