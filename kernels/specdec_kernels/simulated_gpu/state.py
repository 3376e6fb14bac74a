"""State of simulated GPUs: current device and streams, running captures, and the record of all events."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ..unknown_names import unknown_name
from .records import SHARED_MEMORY, HostRead, Launch, Upload, caller

if TYPE_CHECKING:
    from .runtime import Graph, Stream

SYNC_DEFAULT, SYNC_WARN, SYNC_ERROR = 0, 1, 2


@contextmanager
def on_the_device() -> Iterator[None]:
    """Runs the work of kernels, for the duration of the block: CPU tensors alone, which nothing needs to watch."""
    with (
        torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch(),
    ):  # fmt: skip
        yield


class Gpu:
    """Simulated GPUs of one architecture, and the record of their work.

    Attributes:
        architecture: Architecture of all devices, such as "sm_90".
        devices: Number of GPUs.
        launches: Triton launches in order. A graph counts its launches at capture, not at replay.
        host_reads: Waits of the host for the device, in order. Waits for events do not count.
        uploads: Copies from pageable memory.
        operators: Number of torch operators that ran a kernel on the device, by name.
        allocations: Number of tensors allocated without writing to them.
        captures: Graphs whose capture has begun, in order.
        events_awaited: Number of waits of the host for an event.
    """

    def __init__(self, architecture: str, devices: int) -> None:
        if architecture not in SHARED_MEMORY:
            raise ValueError(unknown_name("simulated_gpu architecture", architecture, SHARED_MEMORY))
        if devices < 1:
            raise ValueError(f"simulated_gpu: got {devices} devices; expected at least 1")
        self.architecture, self.devices = architecture, devices
        self.launches: list[Launch] = []
        self.host_reads: list[HostRead] = []
        self.uploads: list[Upload] = []
        self.operators: Counter[str] = Counter()
        self.captures: list[Graph] = []
        self.events_awaited = self.allocations = 0
        self.current = 0
        self.streams: dict[int, Stream] = {}  # current stream of each device
        self.sync_mode = SYNC_DEFAULT
        self.capturing: list[Graph] = []
        self.recording_pools: set[Any] = set()
        self.acting: list[torch.device] = []  # the device that plain CPU operators act for
        self._pinned: dict[int, Any] = {}  # storages by address; keeping them alive prevents reuse of their addresses

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability, such as (9, 0)."""
        major, minor = divmod(int(self.architecture.removeprefix("sm_")), 10)
        return major, minor

    def index(self, device: Any) -> int:
        """Returns the index of a device given as None, an int, a string or a torch.device."""
        if device is None or (isinstance(device, int) and device < 0):
            return self.current
        if isinstance(device, int):
            return device
        requested = torch.device(device)
        return self.current if requested.index is None else requested.index

    @property
    def compiled(self) -> list[str]:
        """Names of the compiled kernels, one per specialisation."""
        return [launch.kernel for launch in self.launches if launch.compiled]

    def clear(self) -> None:
        """Clears the records. Compiled kernels stay compiled."""
        for record in (self.launches, self.host_reads, self.uploads, self.captures):
            record.clear()
        self.operators.clear()
        self.events_awaited = self.allocations = 0

    def graph_of(self, device: int) -> Graph | None:
        """Returns the graph that captures work on a device now, or None."""
        for graph in self.capturing:
            if graph.stream == self.streams[device]:
                return graph
        return None

    def wait(self, operator: str, record: bool = True) -> None:
        """Makes the host wait for the device.

        Args:
            operator: Method or operator that waits.
            record: Whether to add the wait to `host_reads`.

        Raises:
            RuntimeError: During a capture, which becomes invalid, and in sync debug mode "error".
        """
        if self.capturing:
            for graph in self.capturing:
                graph.invalid = True
            raise RuntimeError(
                f"CUDA error: operation not permitted when stream is capturing ({operator} at {caller()})"
            )
        if self.sync_mode == SYNC_ERROR:
            raise RuntimeError(f"called a synchronizing CUDA operation ({operator} at {caller()})")
        if self.sync_mode == SYNC_WARN:
            warnings.warn("called a synchronizing CUDA operation", stacklevel=2)
        if record:
            self.host_reads.append(HostRead(operator, caller()))

    def upload(self, operator: str, source: torch.Tensor, non_blocking: bool) -> None:
        """Records a copy from host memory to the device. Pageable memory makes the host wait."""
        if source.numel() == 0:
            return
        if not self.is_pinned(source):
            self.wait(operator, record=False)
            self.uploads.append(Upload(operator, source.numel() * source.element_size(), caller()))
        elif not non_blocking:
            self.wait(f"{operator} from pinned memory without non_blocking")

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Marks the memory of a CPU tensor as pinned and returns the tensor."""
        storage = tensor.untyped_storage()
        self._pinned[storage.data_ptr()] = storage
        return tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Returns whether a CPU tensor is in pinned memory."""
        return tensor.untyped_storage().data_ptr() in self._pinned

    def do(self, device: int, work: Callable[[], None]) -> None:
        """Does the work of a kernel now, and again at every replay of the graph that captures it."""
        with on_the_device():
            work()
        graph = self.graph_of(device)
        if graph is not None:
            graph.work.append(work)
