"""draft_sample in Triton: the reference's token for every draw, with and without known masses."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.interpreter import guarded
from torch import Tensor

from specdec_kernels import distribution_stats, draft_sample, use_backend

INF = float("inf")


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(0, 4),
    st.sampled_from([1, 2, 5, 64, 1000, 1024, 1025, 3003, 9001]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.sampled_from([0.0, 1.0, 6.0, 30.0]),
    st.booleans(),
)
def test_kernel_equals_reference(
    seed: int, rows: int, vocab: int, dtype: torch.dtype, scale: float, forbid: bool
) -> None:
    g = torch.Generator().manual_seed(seed)
    level = guarded((torch.randn(rows, vocab, generator=g) * scale).to(dtype), row_stride=vocab + 3)
    if forbid:
        level[torch.rand(rows, vocab, generator=g) < 0.7] = -INF
    if rows > 2:
        level[2, 0] = float("nan")

    def pick(*choices: float) -> Tensor:
        return torch.tensor(choices)[torch.randint(0, len(choices), (rows,), generator=g)]

    plain = torch.zeros(rows, dtype=torch.int32), torch.ones(rows), torch.zeros(rows)
    filters = (pick(0, 0, 1, 40).int(), pick(1, 0.9), pick(0, 0.01)) if seed % 2 else plain
    *dist, mass = distribution_stats(level, pick(0, 0.5, 1, 1), *filters, masses=True)
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=g)
    positions, index = (torch.randint(0, 2**31 - 1, (rows,), generator=g, dtype=torch.int32) for _ in range(2))
    arguments = (*dist, seeds, positions, index)
    with use_backend("reference"):
        want = draft_sample(level, *arguments)
    with use_backend("triton"):
        assert torch.equal(draft_sample(level, *(guarded(part) for part in arguments)), want)
        assert torch.equal(draft_sample(level, *arguments, mass=guarded(mass)), want)


def test_a_large_vocabulary() -> None:
    level = torch.randn(3, 200_001).bfloat16() * 2
    dist = distribution_stats(
        level, torch.ones(3), torch.tensor([0, 40, 0], dtype=torch.int32), torch.ones(3), torch.zeros(3)
    )
    zero = torch.zeros(3, dtype=torch.int32)
    with use_backend("reference"):
        want = draft_sample(level, *dist, torch.arange(3), zero, zero)
    with use_backend("triton"):
        assert torch.equal(draft_sample(level, *dist, torch.arange(3), zero, zero), want)
