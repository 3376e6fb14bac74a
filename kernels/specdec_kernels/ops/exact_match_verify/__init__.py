"""Operator exact_match_verify: follows the target's choices through draft trees."""

from __future__ import annotations

from ...dispatch.extension import cpu_backend
from ...dispatch.operator import Op, lazy_import
from ...triton_shared.triton_backend import triton_backend
from .reference import exact_match_verify as _reference

__all__ = ["exact_match_verify"]


exact_match_verify = Op(
    "exact_match_verify",
    _reference,
    [
        triton_backend(lazy_import(__name__, "launch:exact_match_verify")),
        cpu_backend(lazy_import(__name__, "cpu_kernel:exact_match_verify"), op="exact_match_verify"),
    ],
    direct_backends=("triton",),
)
