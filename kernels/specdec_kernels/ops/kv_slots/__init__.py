"""kv_slots: slots and positions of the staged nodes of a packed batch in a paged cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...dispatch.extension import cpu_backend
from ...dispatch.operator import Op
from ...triton_shared.triton_backend import triton_backend
from .reference import kv_slots as _reference


def _load_cpu() -> Callable[..., Any]:
    from .cpu_kernel import kv_slots

    return kv_slots


def _load_triton() -> Callable[..., Any]:
    from .launch import kv_slots

    return kv_slots


kv_slots = Op(
    "kv_slots",
    _reference,
    [triton_backend(_load_triton), cpu_backend(_load_cpu, op="kv_slots")],
    direct_backends=("triton",),
    check_data=_reference,
)

__all__ = ["kv_slots"]
