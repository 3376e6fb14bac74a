"""Rows that 16 does not divide, padded to a stride that it does: tiles before the last are loaded without a mask.

The padding is NaN, and results equal those of the same rows without padding, bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec_kernels import OPS, use_backend
from specdec_kernels.testing.agreement import make_sample, map_tensors, tensors_in
from specdec_kernels.testing.samples_attention import Call, Sizes

VOCAB = 9001
STRIDE = 9008
SIZES = Sizes(rows=1, nodes=3, vocab=VOCAB)
CASES = (
    ("distribution_stats", ""), ("distribution_stats", "top-p"), ("distribution_stats", "greedy rows and pivots"),
    ("distribution_stats", "overlay"),
    ("replay_sample", ""), ("draft_sample", "top-p"), ("rejection_verify", "top-p"), ("rejection_verify", "block rule"),
    ("rejection_verify", "overlay"), ("rejection_verify_logits", "top-p"), ("replay_verify", "top-k"),
    ("recursive_rejection_verify", "sampled without replacement"), ("traversal_verify", "sampled"),
    ("typical_verify", ""),
    ("tree_expand", "noise"), ("process_logits", ""),
)  # fmt: skip


def padded(call: Call, stride: int) -> Call:
    """Returns the call with its rows of logits padded to this stride by NaN."""

    def move(tensor: Tensor) -> Tensor:
        if tensor.ndim != 2 or tensor.shape[1] != VOCAB:
            return tensor
        whole = torch.full((len(tensor), stride), torch.nan, dtype=tensor.dtype)
        whole[:, :VOCAB] = tensor
        return whole[:, :VOCAB]

    return map_tensors(call, move)


def results(op: str, call: Call) -> Iterator[Tensor]:
    with use_backend("triton"):
        result: Any = OPS[op](*call.arguments, **call.options)
    yield from (part.clone() for part in (*tensors_in(result), *call.writes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("op", "case"), CASES)
def test_rows_padded_to_wide_loads_have_the_same_results(op: str, case: str, dtype: torch.dtype) -> None:
    with use_backend("reference"):
        made = [padded(make_sample(op, replace(SIZES, dtype=dtype), case=case), stride) for stride in (STRIDE, VOCAB)]
    wide, narrow = (list(results(op, call)) for call in made)
    assert len(wide) == len(narrow) > 0
    for got, want in zip(wide, narrow):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_masks_keep_loads_narrow_where_only_the_stride_is_divisible() -> None:
    from specdec_kernels.triton_shared.jit import unaligned_vocab

    assert unaligned_vocab(VOCAB, STRIDE) and unaligned_vocab(VOCAB, VOCAB, STRIDE)
    assert not unaligned_vocab(VOCAB, VOCAB) and not unaligned_vocab(9008, 9008) and not unaligned_vocab(9008, 9009)
