"""process_logits in Triton: every node's logits to the bit, in place, for every kind of processor, on ragged trees."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.interpreter import guarded, guarded_case
from oracles.logits_processor_cases import Request, arguments, batches, check_nodes, words_of
from torch import Tensor

from specdec_kernels import TokenMasks, process_logits, use_backend
from specdec_kernels.dispatch import argument_checks

HALF_AND_SINGLE = [torch.float32, torch.bfloat16, torch.float16]


def guarded_process(logits: Tensor, **processors: Any) -> Tensor:
    """Runs process_logits on Triton, on guarded copies."""
    copy = guarded(logits, row_stride=logits.shape[1] + 3)
    with use_backend("triton"):
        return logits.copy_(process_logits(copy, **guarded_case(processors)))


@pytest.mark.parametrize("dtype", HALF_AND_SINGLE, ids=str)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(batch=batches(), seed=st.integers(0, 1000))
def test_every_node_is_processed_for_its_own_prefix(dtype: torch.dtype, batch: Any, seed: int) -> None:
    check_nodes(guarded_process, dtype, batch, seed)


def test_a_large_vocabulary_and_a_path_of_64() -> None:
    """Hundreds of committed tokens, some of them on the path again, and a mask over 200,000 ids."""
    vocab, depth = 200_003, 64
    committed = [3, 9, *range(100, 1000, 3)]
    path = [0, *(1 + step % 40 for step in range(depth))]
    request = Request([3], [9], path, [-1, *range(depth)], (1.2, 0.5, 0.25), {7: 1.5}, {9: 400}, {})
    processors = arguments([request], 0, [40, depth])
    ids = torch.zeros(2, 1024, dtype=torch.int32)
    ids[1, : len(committed)] = torch.tensor(committed)
    sizes = torch.tensor([0, len(committed)], dtype=torch.int32)
    processors["penalties"] = replace(processors["penalties"], ids=ids, counts=(ids % 5 == 0).int() * 2, sizes=sizes)
    processors["masks"] = TokenMasks(
        words_of([(torch.rand(vocab) < 0.5).tolist()]), torch.tensor([0, -1], dtype=torch.int32)
    )
    logits = torch.randn(2, vocab)
    want, got = logits.clone(), logits.clone()
    with use_backend("reference"):
        process_logits(want, **processors)
    guarded_process(got, **processors)
    assert torch.equal(got, want) and not torch.equal(got, logits)


def test_invalid_parents_end_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU parents are not checked: cycles, self-references, later nodes and nodes outside the batch."""
    monkeypatch.setattr(argument_checks, "can_read_values", lambda value: False)
    tree = [-1, 0, 1, 2, 3, 4]
    request = Request([3], [9], [0, 1, 2, 3, 4, 5], tree, (1.2, 0.5, 0.25), {7: 1.5}, {9: 400}, {4: 2})
    processors = arguments([request, request], 0, None)
    wild = torch.tensor([-1, 2, 1, 3, 2**31 - 1, 0, 5, -9, 40, 1, 4, 1], dtype=torch.int32)
    # such a parent counts as none
    ended = torch.where((wild >= 0) & (wild < torch.arange(12) % 6), wild, -1).int()
    want, got = torch.randn(12, 12, generator=torch.Generator().manual_seed(0)).repeat(2, 1).split(12)
    guarded_process(want, **processors | {"paths": replace(processors["paths"], parents=ended)})
    guarded_process(got, **processors | {"paths": replace(processors["paths"], parents=wild)})
    assert torch.equal(got, want)
