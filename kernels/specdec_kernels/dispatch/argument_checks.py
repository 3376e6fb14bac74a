"""Argument checks that the operators share.

Every message names the value, the expected value and the remedy.
Tests: tests/kernels/test_boundaries.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..random import BLOCK

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def statistics_dtype(logits: Tensor) -> torch.dtype:
    """Returns the dtype of everything that is computed from these logits: float64 for float64, else float32."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def check_tensor(op: str, name: str, value: object, dtype: torch.dtype, *shape: int | str) -> Tensor:
    """Checks type, dtype, rank and sizes of an argument.

    Args:
        op: Name of the operator, with which the message begins.
        name: Name of the argument.
        value: The argument.
        dtype: Expected dtype.
        *shape: Expected sizes. A string is a free size, named in the message.

    Returns:
        The argument.

    Raises:
        ValueError: If something differs.
    """
    if not isinstance(value, Tensor):
        raise ValueError(f"{op}: {name} is {type(value).__name__}; expected a {dtype} tensor {list(shape)}")
    if value.dtype != dtype:
        raise ValueError(f"{op}: {name} has dtype {value.dtype}; expected {dtype}; convert it with .to({dtype})")
    sizes = value.shape
    if sizes != shape:  # usually they are equal, and each launch checks a dozen tensors
        fits = len(sizes) == len(shape) and all(isinstance(want, str) or got == want for got, want in zip(sizes, shape))
        if not fits:
            raise ValueError(
                f"{op}: {name} has shape {list(sizes)}; expected {[*shape]}; the sizes of all arguments must agree"
            )
    return value


def check_logits(op: str, name: str, value: object, rows: int | str) -> Tensor:
    """Checks a matrix of logits: [rows, V] with V of at least 1, a float dtype, last dimension contiguous."""
    if not isinstance(value, Tensor) or value.ndim != 2:
        got = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{op}: {name} is {got}; expected a tensor [{rows}, V]; flatten batch dimensions first")
    if value.dtype not in FLOAT_DTYPES:
        raise ValueError(f"{op}: {name} has dtype {value.dtype}; expected one of {', '.join(map(str, FLOAT_DTYPES))}")
    if not isinstance(rows, str) and value.shape[0] != rows:
        raise ValueError(f"{op}: {name} has {value.shape[0]} rows; expected {rows}; give one row of logits per node")
    if value.shape[1] < 1 or value.shape[1] >= 2**31:
        raise ValueError(f"{op}: {name} has {value.shape[1]} columns; expected between 1 and 2**31 - 1")
    if value.shape[1] > 1 and value.stride(1) != 1:
        raise ValueError(
            f"{op}: {name} has stride {value.stride(1)} in its last dimension; expected 1 (a row stride is free); "
            "call .contiguous() on it"
        )
    return value


def check_dist(op: str, name: str, value: object, rows: int | str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Checks a distribution (logits, inv_t, lse, cut, tie_id) as `distribution_stats` returns it.

    Args:
        op: Name of the operator.
        name: Name of the argument.
        value: logits [rows, V]; inv_t, lse and cut [rows], float32 or float64; tie_id int32 [rows].
        rows: Expected rows, or the name of a free size.

    Returns:
        The five tensors.

    Raises:
        ValueError: If something differs.
    """
    if not isinstance(value, (tuple, list)) or len(value) != 5:
        raise ValueError(
            f"{op}: {name} is {type(value).__name__}; expected a tuple (logits, inv_t, lse, cut, tie_id); "
            "distribution_stats(logits, ...) returns the last four"
        )
    matrix, inv_t, lse, cut, tie_id = value
    check_logits(op, f"{name} logits", matrix, rows)
    dtype, count = statistics_dtype(matrix), matrix.shape[0]
    check_tensor(op, f"{name} inv_t", inv_t, dtype, count)
    check_tensor(op, f"{name} lse", lse, dtype, count)
    check_tensor(op, f"{name} cut", cut, dtype, count)
    check_tensor(op, f"{name} tie_id", tie_id, torch.int32, count)
    return matrix, inv_t, lse, cut, tie_id


def check_block_masses(op: str, value: object, dist: tuple[Tensor, ...]) -> None:
    """Checks block masses as `distribution_stats(..., masses=True)` returns them; None passes."""
    if value is not None:
        rows, vocab = dist[0].shape
        check_tensor(op, "mass", value, statistics_dtype(dist[0]), rows, (vocab + BLOCK - 1) // BLOCK)


def can_read_values(value: Tensor) -> bool:
    """Returns whether values can be read without waiting for a device; if not, only shapes and dtypes are checked."""
    return value.device.type == "cpu"


def check_values(op: str, name: str, good: Tensor, value: Tensor, expected: str) -> None:
    """Raises ValueError for the first element where `good` is false; only on the CPU, where reading does not wait."""
    if can_read_values(value) and not bool(good.all()):
        at = int((~good).nonzero()[0, 0])
        raise ValueError(f"{op}: {name}[{at}] is {value[at].item()}; expected {expected}")


def check_offsets(op: str, value: object, nodes: int) -> Tensor:
    """Checks offsets int32 [B + 1]: they begin at 0, do not decrease, and are at most `nodes`."""
    checked = check_tensor(op, "offsets", value, torch.int32, "B + 1")
    if checked.shape[0] < 1:
        raise ValueError(f"{op}: offsets is empty; expected B + 1 entries; an empty batch has offsets [0]")
    if not can_read_values(checked):
        return checked
    check_values(op, "offsets", checked[:1] == 0, checked[:1], "0 at the start")
    good = torch.cat([checked.new_ones(1, dtype=torch.bool), checked[1:] >= checked[:-1]])
    check_values(op, "offsets", good & (checked <= nodes), checked, f"offsets that never decrease, up to {nodes} nodes")
    return checked


def check_max_depth(op: str, value: object) -> int:
    """Checks `max_depth`, an int of at least 0."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{op}: max_depth is {value!r}; expected an int >= 0, the capacity of a path without its root")
    return value


def make_contiguous(*arguments: Tensor | None) -> list[Tensor | None]:
    """Returns the arguments as contiguous tensors, for a second try after the compiled operator refused strides."""
    return [argument if argument is None else argument.contiguous() for argument in arguments]
