"""Numbers of the host on the device without waiting for it: a pinned source, so that the copy is a part of the stream.

Tests: tests/cache/test_paged.py, tests/engine/cuda_graph/test_step_program.py, tests/launch/test_uploads.py.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor


def upload_values(values: Sequence[int] | Sequence[bool], place: Tensor) -> None:
    """Write values into a tensor of as many elements. On CUDA behind what the current stream has been given so far; the
    source is not used again before it was read.
    """
    source = torch.tensor(values, dtype=place.dtype, pin_memory=place.device.type == "cuda")
    place.copy_(source, non_blocking=True)


_HOST = torch.device("cpu")
_CODES = {torch.bool: "b", torch.int8: "b", torch.int32: "i", torch.int64: "q", torch.float32: "f"}  # of `array`


def host_to_device(values: Sequence[float], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """A vector of host numbers on a device. Half of what torch.tensor costs."""
    if not values:
        return torch.empty(0, dtype=dtype, device=device)
    found = torch.frombuffer(array(_CODES[dtype], values), dtype=dtype)
    return found if device == _HOST else copy_to_device(found, device)


def copy_to_device(host: Tensor, device: torch.device | str) -> Tensor:
    """Copies a tensor of the host to a device without a wait: the copy is a part of the current stream.

    Args:
        host: Any shape and dtype. On its way to a GPU it is copied to pinned memory first, so the caller may overwrite
            it at once.
        device: Where the result lies.

    Returns:
        A tensor of the same shape and dtype on the device; `host` itself where it lies there already. Work that the
        current stream is given afterwards sees its values; other streams have to wait for this one.

    Raises:
        RuntimeError: For a device that is not there.
    """
    if torch.device(device).type == "cuda" and host.device.type == "cpu":
        return host.pin_memory().to(device, non_blocking=True)
    return host.to(device)


def table_to_device(rows: Sequence[Sequence[float]], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Makes a matrix of host numbers on a device, with a pinned copy as `moved` does.

    Args:
        rows: R sequences of C numbers each.
        dtype: bool, int8, int32, int64 or float32.
        device: Where the result lies.

    Returns:
        Tensor [R, C] of `dtype`; [0, 0] without rows.

    Raises:
        KeyError: For another dtype.
        RuntimeError: For rows whose lengths do not add up to R times that of the first; others are not looked at.
        OverflowError: For an integer that `dtype` cannot hold.
        TypeError: For a number with a fraction where `dtype` holds integers.
    """
    flat = [value for row in rows for value in row]
    return host_to_device(flat, dtype, device).view(len(rows), len(rows[0]) if rows else 0)


def select_entries(values: Tensor, places: Sequence[int]) -> Tensor:
    """Selects entries of a tensor along its first axis, at places that the host knows.

    Args:
        values: [N, ...] of any dtype, on any device.
        places: K places in any order, from 0 to N - 1, or from -N to -1 counted from the end; one may come twice.

    Returns:
        A new tensor [K, ...] of the dtype and on the device of `values`. The places reach a GPU by a pinned copy, and
        the host does not wait.

    Raises:
        IndexError: For a place outside of `values`, on a CPU. A GPU reports it later, as an error of the device.
    """
    return values[host_to_device(places, torch.int64, values.device)]


def current_stream_id(device: torch.device) -> int:
    """Identifies the current stream of a device, for keys of what belongs to one stream.

    Args:
        device: The device, with or without an index; without one it is the current CUDA device.

    Returns:
        The stream's handle as an integer on CUDA, which is 0 for the default stream; 0 on other devices.
    """
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def write_entries(rows: Sequence[int], values: Sequence[int], place: Tensor) -> None:
    """Write a host number to each of these rows of a vector."""
    place[host_to_device(rows, torch.int64, place.device)] = host_to_device(values, place.dtype, place.device)
