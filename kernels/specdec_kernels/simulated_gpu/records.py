"""What a stand-in GPU writes down, and the errors of launches that a real GPU would refuse."""

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
"""Bytes of shared memory that a block may ask for (CUDA C++ Programming Guide, "Compute Capabilities")."""
MOST_BLOCKS = (2**31 - 1, 65_535, 65_535)
"""Largest grid."""
MOST_THREADS = 1024
"""Of a block."""


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
        device: Index of the device that it was launched on.
        stream: Handle of the stream that it was launched on.
        compiled: Whether this stand-in met the specialisation for the first time, so that a process would compile it.
        captured: Whether it went into a graph.
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
    """The host waited for the device.

    Attributes:
        operator: What waited, such as "tolist" or "nonzero".
        place: "file:line" of the project's code that asked.
    """

    operator: str
    place: str


@dataclass(frozen=True, slots=True)
class Upload:
    """A copy from pageable memory of the host, which waits for the stream.

    Attributes:
        operator: What copied.
        size: Bytes.
        place: "file:line" of the project's code that asked.
    """

    operator: str
    size: int
    place: str


def caller() -> str:
    """Returns "file:line" of the nearest frame outside of torch and of the stand-in."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not any(part in name for part in ("/specdec_kernels/simulated_gpu/", "/torch/", "/contextlib.py", "<")):
            return f"{'/'.join(name.rsplit('/', 2)[-2:])}:{frame.f_lineno}"
        assert frame.f_back is not None
        frame = frame.f_back
    return "?"
