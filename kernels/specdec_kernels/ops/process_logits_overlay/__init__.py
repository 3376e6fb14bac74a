"""process_logits_overlay: what `process_logits` does to rows of logits, as an overlay that their readers fold in on
load.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...dispatch.operator import Op
from ...triton_shared.triton_backend import half_or_single, triton_backend
from .reference import process_logits_overlay as _reference

__all__ = ["process_logits_overlay"]


def _load_triton() -> Callable[..., Any]:
    from .launch import process_logits_overlay

    return process_logits_overlay


process_logits_overlay = Op("process_logits_overlay", _reference, [triton_backend(_load_triton, half_or_single)])
