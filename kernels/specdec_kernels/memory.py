"""Memory of the caller's for what operators answer with and for what they need on the way: `out=` and `workspace=`."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

Part = tuple[tuple[int, ...], torch.dtype]
ALIGNMENT = 16


def bytes_of(parts: list[Part]) -> int:
    """Bytes that a workspace for these tensors has."""
    return sum(-(-prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT for shape, dtype in parts)


def carve(op: str, workspace: Tensor | None, device: torch.device, parts: list[Part]) -> list[Tensor]:
    """Tensors of these shapes and dtypes inside a workspace, or in new memory. Their contents are whatever was there.

    workspace: contiguous uint8 of at least `bytes_of(parts)` that begins at a multiple of 16 bytes.
    Raises: ValueError for one that does not fit.
    """
    wanted = bytes_of(parts)
    if workspace is None:
        workspace = torch.empty(wanted, dtype=torch.uint8, device=device)
    elif (
        workspace.dtype != torch.uint8
        or workspace.device != device
        or workspace.numel() < wanted
        or not workspace.is_contiguous()
    ):
        raise ValueError(
            f"{op}: workspace is {workspace.dtype} {list(workspace.shape)} on {workspace.device}, expected contiguous "
            f"uint8 of at least {wanted} bytes on {device}; workspace_size() tells how many"
        )
    elif wanted and workspace.data_ptr() % ALIGNMENT:
        raise ValueError(f"{op}: workspace begins at an odd address, expected a multiple of {ALIGNMENT} bytes")
    found, at = [], 0
    for shape, dtype in parts:
        size = prod(shape) * dtype.itemsize
        found.append(workspace.view(-1)[at : at + size].view(dtype).view(shape))
        at += -(-size // ALIGNMENT) * ALIGNMENT
    return found


def results(op: str, out: tuple[Tensor, ...] | None, device: torch.device, parts: list[Part]) -> tuple[Tensor, ...]:
    """The tensors of `out`, or new ones. Raises: ValueError unless they are contiguous, of these shapes and dtypes."""
    if out is None:
        return tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in parts)
    fits = len(out) == len(parts) and all(
        each.shape == shape and each.dtype == dtype and each.device == device and each.is_contiguous()
        for each, (shape, dtype) in zip(out, parts, strict=False)
    )
    if not fits:
        got = ", ".join(f"{each.dtype} {list(each.shape)}" for each in out)
        want = ", ".join(f"{dtype} {list(shape)}" for shape, dtype in parts)
        raise ValueError(f"{op}: out is ({got}), expected contiguous ({want}) on {device}")
    return out


def into(op: str, out: tuple[Tensor, ...] | None, found: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What was found, copied to `out` where that is given: for backends that make their own tensors."""
    if out is None:
        return found
    own = results(op, out, found[0].device, [(tuple(each.shape), each.dtype) for each in found])
    for to, each in zip(own, found, strict=True):
        to.copy_(each)
    return own
