"""replay_sample in Triton: the reference's token on every row, for any noise, cut and vocabulary."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.interpreter import guarded
from torch import Tensor

from specdec_kernels import distribution_stats, replay_sample, use_backend
from specdec_kernels.random import replay_noise

INF = float("inf")


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(0, 5),
    st.sampled_from([1, 2, 5, 31, 64, 1000, 1024, 1025, 2049, 9001]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.sampled_from([0.0, 1.0, 30.0]),
    st.booleans(),
    st.booleans(),
)
def test_kernel_equals_reference(
    seed: int, rows: int, vocab: int, dtype: torch.dtype, scale: float, explicit: bool, forbid: bool
) -> None:
    g = torch.Generator().manual_seed(seed)
    level = guarded((torch.randn(rows, vocab, generator=g) * scale).to(dtype), row_stride=vocab + 3)
    if forbid:
        level[torch.rand(rows, vocab, generator=g) < 0.5] = -INF
    if rows > 2:
        level[1, vocab // 2], level[2] = float("nan"), -INF

    def pick(*choices: float) -> Tensor:
        return torch.tensor(choices)[torch.randint(0, len(choices), (rows,), generator=g)]

    inv_t, _, cut, tie_id = distribution_stats(
        level, pick(0, 0.5, 1, 1), pick(0, 0, 1, 40).int(), pick(1, 0.9), pick(0, 0.01)
    )
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=g)
    positions = torch.randint(0, 2**31 - 1, (rows,), generator=g, dtype=torch.int32)
    noise = replay_noise(seeds + 1, positions, vocab) if explicit else None
    arguments = (inv_t, cut, tie_id, seeds, positions, noise)
    with use_backend("reference"):
        want = replay_sample(level, *arguments)
    with use_backend("triton"):
        got = replay_sample(level, *(part if part is None else guarded(part) for part in arguments))
    assert torch.equal(got, want)


def test_equal_scores_go_to_the_lower_id() -> None:
    """Across tiles too, and with zeros of either sign."""
    level = torch.full((2, 9000), -1.0)
    level[0, [4500, 8999]], level[1, [5, 8000]] = 0.0, -0.0
    level[1, 8000] = 0.0
    inv_t, _, cut, tie_id = distribution_stats(
        level, torch.ones(2), torch.zeros(2, dtype=torch.int32), torch.ones(2), torch.zeros(2)
    )
    zero = torch.zeros(2, dtype=torch.int32)
    with use_backend("triton"):
        tokens = replay_sample(level, inv_t, cut, tie_id, zero.long(), zero, torch.zeros(2, 9000))
    assert tokens.tolist() == [4500, 5]


@pytest.mark.parametrize("vocab", [200_001])
def test_a_large_vocabulary(vocab: int) -> None:
    level = torch.randn(2, vocab).bfloat16() * 3
    filters = torch.tensor([0, 50], dtype=torch.int32), torch.tensor([1.0, 0.9]), torch.zeros(2)
    inv_t, _, cut, tie_id = distribution_stats(level, torch.ones(2), *filters)
    arguments = (level, inv_t, cut, tie_id, torch.tensor([7, 8]), torch.tensor([3, 4], dtype=torch.int32))
    with use_backend("reference"):
        want = replay_sample(*arguments)
    with use_backend("triton"):
        assert torch.equal(replay_sample(*arguments), want)
