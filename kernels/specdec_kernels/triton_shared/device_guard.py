"""Triton kernels that run on the GPU of their tensors, on its current stream.

Triton launches on the current device. Operators, other launches, torch.ops.specdec and benchmarks launch kernels of
this package. So the kernel itself selects its device. Every launch makes one comparison, and the current device changes
only if needed.

Tests: tests/launch/test_devices.py.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.runtime.jit import JITFunction

from .versions import warn_if_untested


def device_of(values: tuple[Any, ...]) -> int:
    """Returns the index of the GPU of a launch's first tensor; -1 for the CPU and without a tensor."""
    for value in values:
        if isinstance(value, torch.Tensor):
            return value.get_device()
    return -1


class DeviceKernel(JITFunction):
    """A kernel that makes the GPU of its tensors the current one while it is launched."""

    def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        """Binds the arguments, compiles and launches; `kernel[grid](...)` calls it.

        Args:
            args: The arguments of the kernel, tensors first.
            grid: Numbers of programs.
            warmup: Whether to compile only.
            kwargs: More arguments of the kernel, and options of the launch.

        Returns:
            Triton's compiled kernel.
        """
        kwargs.setdefault("enable_fp_fusion", True)  # versions of Triton differ in the default, which changes bits
        device = device_of(args)
        if device < 0 or device == torch.cuda.current_device():
            return super().run(*args, grid=grid, warmup=warmup, **kwargs)
        with torch.cuda.device(device):
            return super().run(*args, grid=grid, warmup=warmup, **kwargs)


def on_own_device(kernel: Any) -> Any:
    """Makes a kernel of `triton.jit` launch on the GPU of its tensors.

    Args:
        kernel: Result of `triton.jit`, whose class changes here because constructors differ between versions of Triton.
            A kernel of the interpreter, which works on tensors of the CPU, is not changed.

    Returns:
        The kernel.
    """
    warn_if_untested()
    if type(kernel) is JITFunction:
        kernel.__class__ = DeviceKernel
    return kernel
