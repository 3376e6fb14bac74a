"""Caller-owned memory of an operator: results (`out=`) and scratch for its kernels (`workspace=`).

A launch declares its scratch in one function from the operator's arguments to shapes and dtypes. That function gives
both the size that a caller asks for and the tensors that the launch takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

ALIGNMENT, ALIGNED = 256, 16
"""Alignment in bytes of the tensors inside a workspace, and of its own address."""
TensorSpec = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of one tensor."""


def declare_scratch(sizes: Callable[..., list[TensorSpec]]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Attaches a function that computes the scratch of a launch.

    Args:
        sizes: Takes the arguments of the launch. Returns shape and dtype of each scratch tensor.

    Returns:
        A decorator for the launch.
    """

    def mark(launch: Callable[..., Any]) -> Callable[..., Any]:
        launch.scratch = sizes  # type: ignore[attr-defined]
        return launch

    return mark


def path_specs(rows: int, max_depth: int) -> list[TensorSpec]:
    """Returns the specs of a verify operator's results: path, num_accepted, next_token."""
    return [((rows, max_depth + 1), torch.int32), ((rows,), torch.int32), ((rows,), torch.int64)]


def _aligned_bytes(spec: TensorSpec) -> int:
    shape, dtype = spec
    return -(-prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT


def total_bytes(specs: Sequence[TensorSpec]) -> int:
    """Returns the bytes of a workspace for these tensors."""
    return sum(map(_aligned_bytes, specs))


def carve_workspace(
    op: str, workspace: Tensor | None, specs: Sequence[TensorSpec], device: torch.device
) -> tuple[list[Tensor], Tensor | None]:
    """Allocates the scratch tensors of one call, from the workspace if there is one.

    Args:
        op: Name of the operator, with which messages begin.
        workspace: uint8 [at least `total_bytes(specs)`], contiguous, on the device of the call, or None.
        specs: Shape and dtype of each tensor.
        device: Device of the call.

    Returns:
        The tensors, and the rest of the workspace.

    Raises:
        ValueError: If the workspace does not fit.
    """
    if workspace is None:
        return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in specs], None
    wanted = total_bytes(specs)
    good = workspace.dtype == torch.uint8 and workspace.ndim == 1 and workspace.is_contiguous()
    if not good or workspace.device != device or workspace.shape[0] < wanted:
        raise ValueError(
            f"{op}: workspace is {workspace.dtype} {list(workspace.shape)} on {workspace.device}; expected contiguous "
            f"torch.uint8 [{wanted}] or more on {device}; {op}.workspace_size(...) takes the arguments of the call"
        )
    if wanted and workspace.data_ptr() % ALIGNED:
        raise ValueError(
            f"{op}: workspace begins at an odd address, expected a multiple of {ALIGNED} bytes; slice it there"
        )
    parts, start = [], 0
    for spec in specs:
        shape, dtype = spec
        size = prod(shape) * dtype.itemsize
        parts.append(workspace[start : start + size].view(dtype).view(shape))
        start += _aligned_bytes(spec)
    return parts, workspace[start:]


def _flatten_tensors(result: Any) -> list[Tensor]:
    """Returns the tensors of a result: one tensor, a tuple, or a dataclass, also nested."""
    if isinstance(result, Tensor):
        return [result]
    parts = [getattr(result, each.name) for each in fields(result)] if is_dataclass(result) else result
    return [tensor for part in parts for tensor in _flatten_tensors(part)]


def result_tensors(op: str, out: Any, specs: Sequence[TensorSpec], device: torch.device) -> list[Tensor]:
    """Returns the tensors that an operator writes its results to: those of `out`, or new ones.

    Raises:
        ValueError: If `out` does not fit the specs.
    """
    if out is None:
        return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in specs]
    given = _flatten_tensors(out)
    if len(given) != len(specs):
        raise ValueError(f"{op}: out has {len(given)} tensors; expected {len(specs)}, as the operator returns them")
    for place, (tensor, (shape, dtype)) in enumerate(zip(given, specs)):
        if (
            tensor.dtype != dtype
            or tuple(tensor.shape) != shape
            or tensor.device != device
            or not tensor.is_contiguous()
        ):
            raise ValueError(
                f"{op}: out[{place}] is {tensor.dtype} {list(tensor.shape)} on {tensor.device}; expected contiguous "
                f"{dtype} {list(shape)} on {device}"
            )
    return given


def copy_results(op: str, out: Any, found: Any) -> Any:
    """Copies the results of a kernel that allocates them to `out`, which is returned; without `out` returns them."""
    if out is None:
        return found
    made = _flatten_tensors(found)
    places = result_tensors(op, out, [(tuple(each.shape), each.dtype) for each in made], made[0].device)
    for place, each in zip(places, made):
        place.copy_(each)
    return out
