"""Memory of the caller's for an operator: where results go (`out=`), and scratch for its kernels (`workspace=`).

A launch that needs scratch says so in one place, a function from the operator's arguments to shapes and dtypes; the
size that a caller asks for and the tensors that the launch takes both come from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

ALIGNMENT, ALIGNED = 256, 16
"""Bytes: between the beginnings of tensors in a workspace, and of its own beginning."""
TensorSpec = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of one tensor."""


def declare_scratch(sizes: Callable[..., list[TensorSpec]]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Marks a launch with its scratch: `sizes` takes the launch's arguments and may ignore most of them."""

    def mark(launch: Callable[..., Any]) -> Callable[..., Any]:
        launch.scratch = sizes  # type: ignore[attr-defined]
        return launch

    return mark


def path_specs(rows: int, max_depth: int) -> list[TensorSpec]:
    """Results of a verify operator: path, num_accepted, next_token."""
    return [((rows, max_depth + 1), torch.int32), ((rows,), torch.int32), ((rows,), torch.int64)]


def _aligned_bytes(spec: TensorSpec) -> int:
    shape, dtype = spec
    return -(-prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT


def total_bytes(specs: Sequence[TensorSpec]) -> int:
    """Bytes of a workspace for these tensors."""
    return sum(map(_aligned_bytes, specs))


def carve_workspace(
    op: str, workspace: Tensor | None, specs: Sequence[TensorSpec], device: torch.device
) -> tuple[list[Tensor], Tensor | None]:
    """Tensors for one call, out of the workspace or fresh, and what is left of the workspace.

    workspace: uint8 [at least `total_bytes(specs)`], contiguous, on the device of the call, or None.
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
        raise ValueError(f"{op}: workspace begins at an odd address, expected a multiple of {ALIGNED} bytes")
    parts, start = [], 0
    for spec in specs:
        shape, dtype = spec
        size = prod(shape) * dtype.itemsize
        parts.append(workspace[start : start + size].view(dtype).view(shape))
        start += _aligned_bytes(spec)
    return parts, workspace[start:]


def _flatten_tensors(result: Any) -> list[Tensor]:
    """Of a result: one tensor, several, or a dataclass of them, also inside of one another."""
    if isinstance(result, Tensor):
        return [result]
    parts = [getattr(result, each.name) for each in fields(result)] if is_dataclass(result) else result
    return [tensor for part in parts for tensor in _flatten_tensors(part)]


def result_tensors(op: str, out: Any, specs: Sequence[TensorSpec], device: torch.device) -> list[Tensor]:
    """The tensors that an operator writes its results to: those of `out` (one, or a tuple), or fresh ones."""
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
    """For kernels that make their own results: copies them to `out`, which is returned. None: what was found."""
    if out is None:
        return found
    made = _flatten_tensors(found)
    places = result_tensors(op, out, [(tuple(each.shape), each.dtype) for each in made], made[0].device)
    for place, each in zip(places, made):
        place.copy_(each)
    return out
