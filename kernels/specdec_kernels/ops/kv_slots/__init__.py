"""kv_slots: slots and positions of the staged nodes of a packed batch in a paged cache."""

from __future__ import annotations

from ...dispatch.extension import cpu_backend
from ...dispatch.operator import Op, lazy_import
from ...triton_shared.triton_backend import triton_backend
from .reference import kv_slots as _reference

kv_slots = Op(
    "kv_slots",
    _reference,
    [
        triton_backend(lazy_import(__name__, "launch:kv_slots")),
        cpu_backend(lazy_import(__name__, "cpu_kernel:kv_slots"), op="kv_slots"),
    ],
    direct_backends=("triton",),
    check_data=_reference,
)

__all__ = ["kv_slots"]
