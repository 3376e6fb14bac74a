"""overlay_edits: what `edit_logits` does to rows of logits, as an overlay that their readers fold in on load."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..dispatch import Op
from ..triton_backend import half_or_single, triton_backend
from .reference import overlay_edits as _reference

__all__ = ["overlay_edits"]


def _load_triton() -> Callable[..., Any]:
    from .launch import overlay_edits

    return overlay_edits


overlay_edits = Op("overlay_edits", _reference, [triton_backend(_load_triton, half_or_single)])
