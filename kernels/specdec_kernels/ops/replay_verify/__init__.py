"""Operator replay_verify: replay_sample at the nodes that exact_match_verify visits, and at no others."""

from __future__ import annotations

from ...dispatch.extension import cpu_backend
from ...dispatch.operator import Op, lazy_import
from ...triton_shared.triton_backend import dists_signature, triton_backend, why_not_float64_dists
from .reference import replay_verify as _reference

__all__ = ["replay_verify"]


replay_verify = Op(
    "replay_verify",
    _reference,
    [
        triton_backend(lazy_import(__name__, "launch:replay_verify"), why_not_float64_dists(logits=5)),
        cpu_backend(lazy_import(__name__, "cpu_kernel:replay_verify"), op="replay_verify"),
    ],
    key=dists_signature(logits=5),
    direct_backends=("triton",),
    overlaid="logits",
)
