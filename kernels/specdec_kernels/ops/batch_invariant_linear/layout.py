"""The layout of weights that is read fastest. Tests: tests/kernels/test_batch_invariant_linear.py."""

from __future__ import annotations

import torch

from ...dispatch import extension

_FIRST_WITH_PAIRS = 4
"""Isa::Avx512Bf16 of csrc/isa.h. From here on, pairs of bfloat16 inputs are multiplied, from torch's own layout."""


def stores_by_input(dtype: torch.dtype) -> bool:
    """Returns whether products of few rows on this CPU are faster from weights that are stored by input.

    Args:
        dtype: Dtype of the weights and of the rows.
    """
    if extension.unavailable_reason() is not None:
        return True
    asked = getattr(torch.ops.specdec, "batch_invariant_linear_isa", None)
    return asked is None or int(asked(torch.empty(0, dtype=dtype))) < _FIRST_WITH_PAIRS
