"""Operator replay_sample: samples tokens with shared Gumbel noise, the same with and without speculation."""

from __future__ import annotations

from ...dispatch.extension import cpu_backend
from ...dispatch.operator import Op, lazy_import
from ...triton_shared.triton_backend import triton_backend, why_not_float64
from .reference import replay_sample as _reference

__all__ = ["replay_sample"]


replay_sample = Op(
    "replay_sample",
    _reference,
    [
        triton_backend(lazy_import(__name__, "launch:replay_sample"), why_not_float64),
        cpu_backend(lazy_import(__name__, "cpu_kernel:replay_sample"), op="replay_sample"),
    ],
    direct_backends=("triton",),
    overlaid="logits",
)
