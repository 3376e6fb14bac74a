"""Sampling parameters of many rows from plain numbers, sequences or tensors.

Tests: tests/core/test_sampling_rows.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from numbers import Integral

import torch
from torch import Tensor

PerRow = float | Sequence[float] | Tensor
"""One number for all rows, or one for each row: a sequence, or a tensor [R]."""

SamplingRows = tuple[Tensor, Tensor, Tensor, Tensor]
"""Temperature, top-k, top-p and min-p, each [R]: float32, int32, float32, float32."""

_EXPECTED = {
    "temperature": ("0 (greedy), or a number from 0.001 to 1,000,000", lambda t: t == 0 or 1e-3 <= t <= 1e6),
    "top_k": ("a count from 0 to 2**31 - 1; 0 and -1 turn top-k off", lambda k: k == int(k) and -1 <= k < 2**31),
    "top_p": ("a number above 0 (at least 1e-30), at most 1; 1 turns top-p off", lambda p: 1e-30 <= p <= 1),
    "min_p": ("a number in [0, 1]; 0 turns min-p off", lambda p: 0 <= p <= 1),
}
"""Name -> what is expected, and whether a finite number is in range."""


def per_row(name: str, value: PerRow, rows: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns one number per row as a tensor on a device.

    Args:
        name: Name of the argument, for messages.
        value: One number for all rows, or one for each row.
        rows: R, the number of rows.
        dtype: dtype of the result.
        device: Device of the result. A tensor on another device is copied.

    Returns:
        Tensor [R] of `dtype`.

    Raises:
        ValueError: If there is another number of values.
    """
    if isinstance(value, (int, float)):
        return torch.full((rows,), value, dtype=dtype, device=device)
    found = value if isinstance(value, Tensor) else torch.tensor(list(value), dtype=dtype)
    if found.dim() == 0:
        found = found.expand(rows)
    if tuple(found.shape) != (rows,):
        raise ValueError(
            f"{name}: got {list(found.shape)} values; expected one number, or a sequence or tensor of {rows}, one for "
            "each row"
        )
    return found.to(device=device, dtype=dtype)


def integer_rows(
    name: str, value: Sequence[int] | Tensor, rows: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Returns one integer per row as a tensor on a device.

    Args:
        name: Name of the argument, for messages.
        value: One integer for each row. Those on a GPU are not read.
        rows: R, the number of rows.
        dtype: dtype of the result, int32 or int64. Its largest value is the largest that is allowed; the least is 0.
        device: Device of the result.

    Returns:
        Tensor [R] of `dtype`.

    Raises:
        ValueError: If there is another number of values, or one of them is no integer or out of range.
    """
    last = torch.iinfo(dtype).max
    expected = f"expected {rows} integers from 0 to {last}, one for each request"
    if isinstance(value, Tensor):
        if value.dtype == torch.bool or value.is_floating_point() or value.is_complex():
            raise ValueError(f"{name}: got a tensor of {value.dtype}; {expected}; convert it with .long()")
        shape = list(value.shape)
        outside = []
        if value.is_cpu and value.dim() == 1:
            wide = value.long()  # narrow integers do not compare with the largest int64
            outside = wide[(wide < 0) | (wide > last)].tolist()
    else:
        if isinstance(value, str) or not isinstance(value, Iterable):
            raise ValueError(f"{name}: got {value!r} for all rows; {expected}; pass a list")
        value = list(value)
        shape = [len(value)]
        outside = [each for each in value if not _is_integer(each) or not 0 <= each <= last]
    if shape != [rows]:
        raise ValueError(f"{name}: got {shape} values; {expected}")
    if outside:
        raise ValueError(f"{name}: got {outside[0]!r}; {expected}")
    found = value if isinstance(value, Tensor) else torch.tensor([int(each) for each in value], dtype=dtype)
    return found.to(device=device, dtype=dtype)


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def sampling_rows(
    rows: int,
    device: torch.device,
    temperature: PerRow = 1.0,
    top_k: PerRow = 0,
    top_p: PerRow = 1.0,
    min_p: PerRow = 0.0,
) -> SamplingRows:
    """Returns the sampling parameters of rows, as `distribution_stats` takes them.

    Args:
        rows: R, the number of rows.
        device: Device of the results.
        temperature: 0 is greedy.
        top_k: 0 and -1 are off.
        top_p: 1 is off.
        min_p: 0 is off.

    Returns:
        Temperature, top-k, top-p and min-p, each [R].

    Raises:
        ValueError: If there is another number of values, or a value is out of range. Values on a GPU are not read.
    """
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    found = []
    for name, value in given.items():
        _check_range(name, value)
        dtype = torch.int32 if name == "top_k" else torch.float32
        found.append(per_row(name, value, rows, dtype, device))
    found[1] = found[1].clamp(min=0)  # vLLM writes -1 for all tokens
    return found[0], found[1], found[2], found[3]


def _check_range(name: str, value: PerRow) -> None:
    """Raises ValueError for a host value that is out of range."""
    if isinstance(value, Tensor):
        if not value.is_cpu:
            return
        value = value.flatten().tolist()
    expected, in_range = _EXPECTED[name]
    for number in [value] if isinstance(value, (int, float)) else value:
        if not (math.isfinite(number) and in_range(number)):
            raise ValueError(f"{name}: got {number!r}; expected {expected}")
