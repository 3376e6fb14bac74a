"""Operator replay_verify: replay_sample at the nodes that exact_match_verify visits, and at no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...dispatch.extension import cpu_backend
from ...dispatch.operator import Op
from ...triton_shared.triton_backend import dists_signature, triton_backend, why_not_float64_dists
from .reference import replay_verify as _reference

__all__ = ["replay_verify"]


def _load_cpu() -> Callable[..., Any]:
    from .cpu_kernel import replay_verify

    return replay_verify


def _load_triton() -> Callable[..., Any]:
    from .launch import replay_verify

    return replay_verify


replay_verify = Op(
    "replay_verify",
    _reference,
    [triton_backend(_load_triton, why_not_float64_dists(logits=5)), cpu_backend(_load_cpu, op="replay_verify")],
    key=dists_signature(logits=5),
    direct_backends=("triton",),
    overlaid="logits",
)
