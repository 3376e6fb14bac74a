"""draft_sample: reference against extension, its distribution over blocks, and independent draws."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as statistics
from torch import Tensor

from specdec_kernels import distribution_stats, draft_sample, use_backend
from specdec_kernels.dispatch import extension
from specdec_kernels.ops.distribution_stats import dist_probs

BACKENDS = ["reference"] + ([] if extension.unavailable_reason() else ["cpu"])
FAST = BACKENDS[-1]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
INF = float("inf")


def plain(rows: int) -> tuple[Tensor, ...]:
    return torch.ones(rows), torch.zeros(rows, dtype=torch.int32), torch.ones(rows), torch.zeros(rows)


@pytest.mark.skipif("cpu" not in BACKENDS, reason="CPU extension not built")
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(0, 5),
    st.sampled_from([1, 2, 5, 31, 64, 1000, 1024, 1025, 3003, 40_000]),
    st.sampled_from(DTYPES),
    st.sampled_from([0.0, 1.0, 6.0, 30.0]),
    st.booleans(),
)
def test_extension_equals_reference(
    seed: int, rows: int, vocab: int, dtype: torch.dtype, scale: float, forbid: bool
) -> None:
    g = torch.Generator().manual_seed(seed)
    level = (torch.randn(rows, vocab + 3, generator=g) * scale).to(dtype)[:, :vocab]
    if forbid:
        level[torch.rand(rows, vocab, generator=g) < 0.7] = -INF

    def pick(*choices: float) -> Tensor:
        return torch.tensor(choices)[torch.randint(0, len(choices), (rows,), generator=g)]

    filters = (pick(0, 0, 1, 40).int(), pick(1, 0.9), pick(0, 0.01)) if seed % 2 else plain(rows)[1:]
    *dist, mass = distribution_stats(level, pick(0, 0.5, 1, 1), *filters, masses=True)
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=g)
    positions, index = (torch.randint(0, 2**31 - 1, (rows,), generator=g, dtype=torch.int32) for _ in range(2))
    with use_backend("reference"):
        want = draft_sample(level, *dist, seeds, positions, index)
    with use_backend("cpu"):
        assert torch.equal(draft_sample(level, *dist, seeds, positions, index), want)
        assert torch.equal(draft_sample(level, *dist, seeds, positions, index, mass=mass), want)


@pytest.mark.parametrize("vocab", [6, 2500])
def test_the_distribution_is_the_draft_s(vocab: int) -> None:
    rows = 100_000 if vocab < 100 else 20_000
    level = torch.randn(vocab) * 2
    level[vocab // 2] = -INF
    dist = distribution_stats(level[None], *plain(1))
    with use_backend(FAST):
        tokens = draft_sample(
            level.expand(rows, -1),
            *(part.expand(rows).contiguous() for part in dist),
            torch.arange(rows),
            torch.full((rows,), 5, dtype=torch.int32),
            torch.full((rows,), 2, dtype=torch.int32),
        )
    weights = dist_probs(level[None], *dist)[0].double()
    counts = torch.bincount(tokens, minlength=vocab).double()
    assert counts[vocab // 2] == 0
    expected = weights / weights.sum() * rows
    common = expected >= 10  # rare tokens are counted together
    observed = torch.cat([counts[common], counts[~common].sum()[None]])
    wanted = torch.cat([expected[common], expected[~common].sum()[None]])
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    assert statistics.chisquare(observed.numpy(), wanted.numpy() / wanted.sum().item() * rows).pvalue > 1e-3


@pytest.mark.parametrize("moved", ["position", "index"])
def test_draws_are_independent(moved: str) -> None:
    rows, vocab = 100_000, 3
    level = torch.tensor([0.0, 1.0, 0.5]).expand(rows, vocab)
    dist = distribution_stats(level, *plain(rows))
    zero = torch.zeros(rows, dtype=torch.int32)
    other = {"position": (zero + 1, zero), "index": (zero, zero + 1)}[moved]
    with use_backend(FAST):
        first = draft_sample(level, *dist, torch.arange(rows), zero, zero)
        second = draft_sample(level, *dist, torch.arange(rows), *other)
    table = torch.bincount(first * vocab + second, minlength=vocab * vocab).view(vocab, vocab)
    assert statistics.chi2_contingency(table.numpy()).pvalue > 1e-3


@pytest.mark.parametrize("backend", BACKENDS)
def test_greedy_and_broken_rows(backend: str) -> None:
    level = torch.tensor([[0.0, 2.0, 2.0], [1.0, float("nan"), 5.0], [-INF, -INF, -INF]])
    zero = torch.zeros(3, dtype=torch.int32)
    with use_backend(backend):
        dist = distribution_stats(level, torch.tensor([0.0, 1.0, 1.0]), *plain(3)[1:])
        assert draft_sample(level, *dist, torch.arange(3), zero, zero).tolist() == [1, 0, 0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_bad_arguments_are_named(backend: str) -> None:
    level = torch.zeros(2, 3)
    dist = distribution_stats(level, *plain(2))
    seeds, zero = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int32)
    with use_backend(backend):
        with pytest.raises(ValueError, match=r"index.*torch.int32"):
            draft_sample(level, *dist, seeds, zero, zero.long())
        with pytest.raises(ValueError, match=r"seeds.*torch.int64"):
            draft_sample(level, *dist, zero, zero, zero)
        with pytest.raises(ValueError, match=r"lse.*shape"):
            draft_sample(level, dist[0], dist[1][:1], *dist[2:], seeds, zero, zero)
