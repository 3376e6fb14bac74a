"""Shapes of the compiled operators that may appear inside torch.compile, for tracing without data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _nothing(*args: Any) -> None:
    return None


def _attention(query: Tensor, *args: Any) -> Tensor:
    return torch.empty(query.shape, dtype=query.dtype, device=query.device)


def _attention_lse(query: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    return _attention(query), torch.empty(query.shape[:2], dtype=wide, device=query.device)


_FAKES: dict[str, Callable[..., Any]] = {
    "kv_stage": _nothing,
    "kv_commit": _nothing,
    "tree_attention": _attention,
    "tree_attention_lse": _attention_lse,
    "tree_attention_out": _nothing,
}


def register() -> None:
    """Registers the fake kernels of the operators that the loaded extension has. Call once per process."""
    for name, fake in _FAKES.items():
        if hasattr(torch.ops.specdec, name):
            torch.library.register_fake(f"specdec::{name}", fake)
