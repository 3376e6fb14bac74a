"""Triton launches on a simulated GPU: every step from `kernel[grid](...)` to the kernel, which does not run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from .records import MAX_GRID, MAX_THREADS, SHARED_MEMORY, Launch, LaunchError
from .runtime import PROCESSORS
from .state import Gpu
from .tensors import DeviceTensor


class _Utilities:
    """Device queries that Triton sends to its driver."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def get_device_properties(self, device: int) -> dict[str, int]:
        """Returns the properties by the names that Triton uses."""
        shared = SHARED_MEMORY[self._gpu.architecture]
        return {"max_shared_mem": shared, "multiprocessor_count": PROCESSORS, "warpSize": 32, "max_num_regs": 65_536}


class SimulatedDriver:
    """Triton's active driver: reports the compile target and the current device and stream."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu, self.utils = gpu, _Utilities(gpu)

    def get_current_target(self) -> Any:
        """Returns the architecture that kernels are compiled for."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", int(self._gpu.architecture.removeprefix("sm_")), 32)

    def get_current_device(self) -> int:
        """Returns a number for architecture and device, which Triton uses as the key of compiled kernels."""
        return int(self._gpu.architecture.removeprefix("sm_")) * 64 + self._gpu.current

    def get_current_stream(self, device: int | None = None) -> int:
        """Returns the handle of the current stream."""
        return self._gpu.streams[self._gpu.current].cuda_stream

    def get_active_torch_device(self) -> torch.device:
        """Returns the device of tensors that Triton allocates."""
        return torch.device("cuda", self._gpu.current)

    def get_device_interface(self) -> Any:
        """Returns torch.cuda."""
        return torch.cuda

    def is_active(self) -> bool:
        """Returns True: Triton uses this driver."""
        return True


def _name(kernel: Any) -> str:
    module = kernel.fn.__module__.removeprefix("specdec_kernels.ops.")
    return f"{module}:{kernel.fn.__name__}"


def _checked_grid(name: str, grid: Any, arguments: dict[str, Any]) -> tuple[int, ...]:
    """Returns the grid as a tuple. Raises LaunchError for a grid that a GPU refuses."""
    sizes = tuple(grid(arguments) if callable(grid) else grid)
    good = 1 <= len(sizes) <= 3 and all(type(size) is int for size in sizes)
    if not good or any(not 1 <= size <= most for size, most in zip(sizes, MAX_GRID)):
        raise LaunchError(f"{name}: grid {sizes}; expected one to three ints from 1 to {MAX_GRID}")
    return sizes


def _check_arguments(name: str, values: dict[str, Any], gpu: Gpu) -> None:
    """Raises LaunchError for tensors that are not on the current device."""
    for argument, value in values.items():
        if not isinstance(value, torch.Tensor):
            continue
        if not isinstance(value, DeviceTensor):
            raise LaunchError(f"{name}: {argument} is on the CPU; a kernel cannot read it")
        if value.device.index != gpu.current:
            raise LaunchError(f"{name}: {argument} is on {value.device}; the launch goes to cuda:{gpu.current}")


def _check_resources(name: str, kernel: Any, gpu: Gpu) -> None:
    """Raises LaunchError for a kernel that needs more than the device has."""
    metadata, most = kernel.metadata, SHARED_MEMORY[gpu.architecture]
    if metadata.num_warps * 32 > MAX_THREADS:
        raise LaunchError(f"{name}: {metadata.num_warps} warps; a block has at most {MAX_THREADS} threads")
    scratch = getattr(metadata, "global_scratch_size", 0) or getattr(metadata, "profile_scratch_size", 0)
    if scratch:
        raise LaunchError(f"{name}: needs {scratch} bytes of global scratch; Triton has no allocator for them")
    if metadata.shared > most:
        raise LaunchError(f"{name}: {metadata.shared} bytes of shared memory; {gpu.architecture} gives {most}")


@contextmanager
def installed(gpu: Gpu, make_driver: Callable[[Gpu], Any] | None = None) -> Iterator[None]:
    """Simulates Triton launches for the duration of the block.

    Args:
        gpu: The simulated GPUs.
        make_driver: Creates a driver that also launches the compiled kernels. By default nothing is launched.

    Yields:
        Nothing.
    """
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    original, seen = JITFunction.run, {}

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        name = _name(self)
        arguments = dict(zip(self.arg_names, args)) | {key: kwargs[key] for key in kwargs if key in self.arg_names}
        _check_arguments(name, arguments, gpu)
        sizes = _checked_grid(name, grid, arguments)
        kernel = original(self, *args, grid=grid, warmup=make_driver is None, **kwargs)
        compiled = (gpu.current, id(kernel)) not in seen
        seen[gpu.current, id(kernel)] = kernel  # keeps the kernel alive, so its id stays unique
        _check_resources(name, kernel, gpu)
        captured = gpu.graph_of(gpu.current) is not None
        where = (gpu.current, gpu.streams[gpu.current].cuda_stream)
        gpu.launches.append(
            Launch(name, sizes, kernel.metadata.num_warps, kernel.metadata.shared, *where, compiled, captured)
        )
        return kernel

    former = driver._active
    driver.set_active((make_driver or SimulatedDriver)(gpu))
    try:
        with patch.object(JITFunction, "run", run):
            yield
    finally:
        driver._active = former
