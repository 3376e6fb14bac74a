"""ngram_match: prompt lookup, the continuation of the longest suffix of a history that occurred before."""

from __future__ import annotations

from ...dispatch.extension import cpu_backend
from ...dispatch.operator import Op, lazy_import
from ...triton_shared.triton_backend import triton_backend
from .reference import ngram_match as _reference

ngram_match = Op(
    "ngram_match",
    _reference,
    [
        triton_backend(lazy_import(__name__, "launch:ngram_match")),
        cpu_backend(lazy_import(__name__, "cpu_kernel:ngram_match"), op="ngram_match"),
    ],
    direct_backends=("triton",),
)

__all__ = ["ngram_match"]
