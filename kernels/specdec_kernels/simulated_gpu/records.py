"""Records of a simulated GPU, and the error for launches that a real GPU would refuse."""

from __future__ import annotations

import sys
from dataclasses import dataclass

SHARED_MEMORY = {
    "sm_80": 166_912,
    "sm_86": 101_376,
    "sm_89": 101_376,
    "sm_90": 232_448,
    "sm_100": 232_448,
    "sm_120": 101_376,
}
"""Largest shared memory of a block in bytes (CUDA C++ Programming Guide, "Compute Capabilities")."""
MAX_GRID = (2**31 - 1, 65_535, 65_535)
"""Largest grid."""
MAX_THREADS = 1024
"""Most threads of a block."""


class LaunchError(AssertionError):
    """A launch that a GPU would refuse, or that would run on the wrong device."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a Triton kernel.

    Attributes:
        kernel: "operator module:function", such as "distribution_stats.triton_kernel:scan".
        grid: Number of programs in each dimension.
        warps: Warps of a program.
        shared: Bytes of shared memory of a program.
        device: Index of the device of the launch.
        stream: Handle of the stream of the launch.
        compiled: Whether this is the first launch of the specialisation, for which a process compiles it.
        captured: Whether a graph captured the launch.
    """

    kernel: str
    grid: tuple[int, ...]
    warps: int
    shared: int
    device: int
    stream: int
    compiled: bool
    captured: bool


@dataclass(frozen=True, slots=True)
class HostRead:
    """One wait of the host for the device.

    Attributes:
        operator: Method or operator that waited, such as "tolist" or "nonzero".
        place: "file:line" of the calling code in the project.
    """

    operator: str
    place: str


@dataclass(frozen=True, slots=True)
class Upload:
    """A copy from pageable memory of the host, which waits for the stream.

    Attributes:
        operator: Method or operator that copied.
        size: Bytes copied.
        place: "file:line" of the calling code in the project.
    """

    operator: str
    size: int
    place: str


def caller() -> str:
    """Returns "file:line" of the nearest frame outside of torch and of this package."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not any(part in name for part in ("/specdec_kernels/simulated_gpu/", "/torch/", "/contextlib.py", "<")):
            return f"{'/'.join(name.rsplit('/', 2)[-2:])}:{frame.f_lineno}"
        assert frame.f_back is not None
        frame = frame.f_back
    return "?"
