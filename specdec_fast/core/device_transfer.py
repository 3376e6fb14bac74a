"""Copies of host values to a device that do not wait for it.

The source is pinned memory, so the copy is a part of the current stream.

Tests: tests/cache/test_paged.py, tests/engine/cuda_graph/test_step_program.py, tests/launch/test_uploads.py.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor


def upload_values(values: Sequence[int] | Sequence[bool], place: Tensor) -> None:
    """Writes host values into a tensor.

    On CUDA the copy joins the current stream, and its pinned source stays alive until it was read.

    Args:
        values: N numbers or booleans.
        place: Tensor of N elements that is written to.
    """
    source = torch.tensor(values, dtype=place.dtype, pin_memory=place.device.type == "cuda")
    place.copy_(source, non_blocking=True)


_HOST = torch.device("cpu")
_ARRAY_CODES = {torch.bool: "b", torch.int8: "b", torch.int32: "i", torch.int64: "q", torch.float32: "f"}


def host_to_device(values: Sequence[float], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Copies a vector of host numbers to a device. It costs half as much as `torch.tensor`.

    Args:
        values: N numbers.
        dtype: bool, int8, int32, int64 or float32.
        device: Device of the result.

    Returns:
        Tensor [N] of `dtype`.

    Raises:
        KeyError: For another dtype.
        OverflowError: For an integer that `dtype` cannot hold.
        TypeError: For a number with a fraction if `dtype` holds integers.
    """
    if not values:
        return torch.empty(0, dtype=dtype, device=device)
    found = torch.frombuffer(array(_ARRAY_CODES[dtype], values), dtype=dtype)
    return found if device == _HOST else copy_to_device(found, device)


def copy_to_device(host: Tensor, device: torch.device | str) -> Tensor:
    """Copies a host tensor to a device without a wait. The copy is a part of the current stream.

    Args:
        host: Any shape and dtype. It is copied to pinned memory first, so the caller may overwrite it at once.
        device: Device of the result.

    Returns:
        A tensor of the same shape and dtype on the device, or `host` itself if it is there already. Later work of the
        current stream sees its values; other streams must wait for this one.

    Raises:
        RuntimeError: If the device does not exist.
    """
    if torch.device(device).type == "cuda" and host.device.type == "cpu":
        return host.pin_memory().to(device, non_blocking=True)
    return host.to(device)


def table_to_device(rows: Sequence[Sequence[float]], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Copies a matrix of host numbers to a device, as `host_to_device` does with vectors.

    Args:
        rows: R sequences of C numbers each.
        dtype: bool, int8, int32, int64 or float32.
        device: Device of the result.

    Returns:
        Tensor [R, C] of `dtype`; [0, 0] without rows.

    Raises:
        KeyError: For another dtype.
        RuntimeError: If the lengths of the rows do not add up to R times the first length.
        OverflowError: For an integer that `dtype` cannot hold.
        TypeError: For a number with a fraction if `dtype` holds integers.
    """
    flat = [value for row in rows for value in row]
    return host_to_device(flat, dtype, device).view(len(rows), len(rows[0]) if rows else 0)


def select_entries(values: Tensor, places: Sequence[int]) -> Tensor:
    """Selects entries of a tensor along its first axis by host indices, without a wait.

    Args:
        values: Any dtype, on any device, [N, ...].
        places: K indices in any order, -N to N - 1, repetitions allowed.

    Returns:
        A new tensor [K, ...] of the dtype and on the device of `values`.

    Raises:
        IndexError: On a CPU, for an index outside of `values`. A GPU reports it later, as an error of the device.
    """
    return values[host_to_device(places, torch.int64, values.device)]


def current_stream_id(device: torch.device) -> int:
    """Returns an integer that identifies the current stream of a device, as a key of values that belong to a stream.

    Args:
        device: The device. Without an index it is the current CUDA device.

    Returns:
        The handle of the stream on CUDA, 0 for the default stream; 0 on other devices.
    """
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def write_entries(rows: Sequence[int], values: Sequence[int], place: Tensor) -> None:
    """Writes host numbers to some entries of a vector.

    Args:
        rows: K indices of `place`, all different.
        values: K numbers.
        place: Vector that is written to.
    """
    place[host_to_device(rows, torch.int64, place.device)] = host_to_device(values, place.dtype, place.device)
