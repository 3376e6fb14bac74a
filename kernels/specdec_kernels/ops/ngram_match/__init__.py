"""ngram_match: prompt lookup, the continuation of the longest suffix of a history that occurred before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...dispatch.extension import cpu_backend
from ...dispatch.operator import Op
from ...triton_shared.triton_backend import triton_backend
from .reference import ngram_match as _reference


def _load_cpu() -> Callable[..., Any]:
    from .cpu_kernel import ngram_match

    return ngram_match


def _load_triton() -> Callable[..., Any]:
    from .launch import ngram_match

    return ngram_match


ngram_match = Op(
    "ngram_match",
    _reference,
    [triton_backend(_load_triton), cpu_backend(_load_cpu, op="ngram_match")],
    direct_backends=("triton",),
)

__all__ = ["ngram_match"]
