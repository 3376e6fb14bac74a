"""edit_logits: penalties, bias, forced tokens and masks, for every node on its own path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..dispatch import Op
from ..extension import cpu_backend
from ..triton_backend import half_or_single, triton_backend
from .edits import ALWAYS, Additions, Forced, NodePaths, Penalties, TokenMasks
from .reference import edit_logits as _reference

__all__ = ["ALWAYS", "Additions", "Forced", "NodePaths", "Penalties", "TokenMasks", "edit_logits"]


def _load_cpu() -> Callable[..., Any]:
    from .cpu_kernel import edit_logits

    return edit_logits


def _load_triton() -> Callable[..., Any]:
    from .launch import edit_logits

    return edit_logits


edit_logits = Op(
    "edit_logits", _reference, [triton_backend(_load_triton, half_or_single), cpu_backend(_load_cpu, op="edit_logits")]
)
