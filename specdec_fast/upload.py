"""Numbers of the host on the device without waiting for it: a pinned source, so that the copy is a part of the stream.

Tests: tests/cache/test_paged.py, tests/engine/test_graph_step.py.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor


def upload(values: Sequence[int] | Sequence[bool], place: Tensor) -> None:
    """Write values into a tensor of as many elements. On CUDA behind what the current stream has been given so far; the
    source is not used again before it was read.
    """
    source = torch.tensor(values, dtype=place.dtype, pin_memory=place.device.type == "cuda")
    place.copy_(source, non_blocking=True)


_HOST = torch.device("cpu")
_CODES = {torch.bool: "b", torch.int8: "b", torch.int32: "i", torch.int64: "q", torch.float32: "f"}  # of `array`


def from_host(values: Sequence[float], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """A vector of host numbers on a device. Half of what torch.tensor costs."""
    if not values:
        return torch.empty(0, dtype=dtype, device=device)
    found = torch.frombuffer(array(_CODES[dtype], values), dtype=dtype)
    return found if device == _HOST else moved(found, device)


def moved(host: Tensor, device: torch.device | str) -> Tensor:
    """A tensor of the host on a device; the copy is a part of the current stream, and nobody waits for it."""
    if torch.device(device).type == "cuda" and host.device.type == "cpu":
        return host.pin_memory().to(device, non_blocking=True)
    return host.to(device)


def table_from_host(rows: Sequence[Sequence[float]], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """A matrix of host numbers on a device; all rows have the same length."""
    flat = [value for row in rows for value in row]
    return from_host(flat, dtype, device).view(len(rows), len(rows[0]) if rows else 0)


def entries(values: Tensor, places: Sequence[int]) -> Tensor:
    """Entries of a tensor along its first axis, at places that the host knows."""
    return values[from_host(places, torch.int64, values.device)]


def stream_of(device: torch.device) -> int:
    """The current stream of a device, as a number; 0 where there are none."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def write_at(rows: Sequence[int], values: Sequence[int], place: Tensor) -> None:
    """Write a host number to each of these rows of a vector."""
    place[from_host(rows, torch.int64, place.device)] = from_host(values, place.dtype, place.device)
