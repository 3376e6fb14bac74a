"""Operator typical_verify: typical acceptance on trees. Lossy: it does not keep the target's distribution."""

from __future__ import annotations

from ...dispatch.extension import cpu_backend
from ...dispatch.operator import Op, lazy_import
from ...triton_shared.triton_backend import dists_signature, triton_backend, why_not_float64_dists
from .reference import typical_verify as _reference

__all__ = ["typical_verify"]


typical_verify = Op(
    "typical_verify",
    _reference,
    [
        triton_backend(lazy_import(__name__, "launch:typical_verify"), why_not_float64_dists(target=4)),
        cpu_backend(lazy_import(__name__, "cpu_kernel:typical_verify"), op="typical_verify"),
    ],
    key=dists_signature(target=4),
    direct_backends=("triton",),
    overlaid="target",
)
