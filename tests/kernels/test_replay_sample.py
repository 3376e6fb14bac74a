"""replay_sample: reference against extension, its distribution, its coupling, and the rows that need no noise."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as statistics
from torch import Tensor

from specdec_kernels import distribution_stats, replay_sample, use_backend
from specdec_kernels.dispatch import extension
from specdec_kernels.ops.distribution_stats import dist_probs
from specdec_kernels.random import replay_noise

BACKENDS = ["reference"] + ([] if extension.unavailable_reason() else ["cpu"])
FAST = BACKENDS[-1]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
INF = float("inf")


def plain(rows: int, t: float = 1.0) -> tuple[Tensor, ...]:
    return torch.full((rows,), t), torch.zeros(rows, dtype=torch.int32), torch.ones(rows), torch.zeros(rows)


@pytest.mark.skipif("cpu" not in BACKENDS, reason="CPU extension not built")
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(0, 5),
    st.sampled_from([1, 2, 5, 31, 64, 1000, 1024, 1025, 3003, 40_000]),
    st.sampled_from(DTYPES),
    st.sampled_from([0.0, 1.0, 6.0, 30.0]),
    st.booleans(),
    st.booleans(),
)
def test_extension_equals_reference(
    seed: int, rows: int, vocab: int, dtype: torch.dtype, scale: float, explicit: bool, forbid: bool
) -> None:
    g = torch.Generator().manual_seed(seed)
    level = (torch.randn(rows, vocab + 3, generator=g) * scale).to(dtype)[:, :vocab]
    if forbid:
        level[torch.rand(rows, vocab, generator=g) < 0.5] = -INF

    def pick(*choices: float) -> Tensor:
        return torch.tensor(choices)[torch.randint(0, len(choices), (rows,), generator=g)]

    inv_t, _, cut, tie_id = distribution_stats(
        level, pick(0, 0.5, 1, 1), pick(0, 0, 1, 40).int(), pick(1, 0.9), pick(0, 0.01)
    )
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=g)
    positions = torch.randint(0, 2**31 - 1, (rows,), generator=g, dtype=torch.int32)
    noise = replay_noise(seeds + 1, positions, vocab) if explicit else None
    arguments = (level, inv_t, cut, tie_id, seeds, positions, noise)
    with use_backend("reference"):
        want = replay_sample(*arguments)
    with use_backend("cpu"):
        assert torch.equal(replay_sample(*arguments), want)


@pytest.mark.skipif("cpu" not in BACKENDS, reason="CPU extension not built")
@pytest.mark.parametrize("temperature", [1e-4, 0.3, 1.0, 30.0])
def test_skipped_tokens_cannot_win(temperature: float) -> None:
    """Groups whose bound is below the best so far get no noise: one large winner, blocks of -inf, levels far from zero,
    and levels rounded to few values, where ties go to the lower id.
    """
    rows, vocab = 48, 5000
    torch.manual_seed(7)
    peaked = torch.randn(rows, vocab) * 4
    peaked[torch.arange(rows), torch.randint(vocab, (rows,))] += 40
    masked = torch.randn(rows, vocab) * 3
    masked[:, 512:4096] = -INF
    for level in (peaked, masked, torch.randn(rows, vocab).round(), torch.randn(rows, vocab) * 50 + 3e5):
        for top_k in (0, 300):
            settings = (
                torch.full((rows,), temperature),
                torch.full((rows,), top_k),
                torch.ones(rows),
                torch.zeros(rows),
            )
            inv_t, _, cut, tie_id = distribution_stats(level, settings[0], settings[1].int(), *settings[2:])
            found = []
            for backend in ("reference", "cpu"):
                with use_backend(backend):
                    keys = torch.arange(rows), torch.full((rows,), 5, dtype=torch.int32)
                    found.append(replay_sample(level, inv_t, cut, tie_id, *keys))
            assert torch.equal(*found)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("temperature", [0.2, 1.0, 9.0])
def test_the_largest_possible_noise_wins(backend: str, temperature: float) -> None:
    """The word of this token is 0. A level below the best score by almost the largest noise still wins."""
    seed, position, token = torch.tensor([101_606]), torch.tensor([5], dtype=torch.int32), 24_512
    noise = replay_noise(seed, position, token + 1)[0]
    assert float(noise[token]) == noise.max() > 22.87
    for ahead, winner in ((-0.01, token), (0.01, 3)):
        level = torch.full((1, token + 1), -100.0)
        level[0, token] = 0.0
        level[0, 3] = (noise[token] - noise[3] + ahead) * temperature
        inv_t, _, cut, tie_id = distribution_stats(level, *plain(1, temperature))
        with use_backend(backend):
            assert replay_sample(level, inv_t, cut, tie_id, seed, position).tolist() == [winner]


def test_the_distribution_is_the_target_s() -> None:
    rows, vocab = 1_000_000, 9
    level = torch.randn(vocab) * 1.5
    level[3] = -INF
    t, k, p, m = plain(1, 0.8)
    dist = distribution_stats(level[None], t, k + 7, p * 0.95, m)
    inv_t, _, cut, tie_id = (part.expand(rows).contiguous() for part in dist)
    with use_backend(FAST):
        tokens = replay_sample(
            level.expand(rows, -1),
            inv_t,
            cut,
            tie_id,
            torch.arange(rows),
            torch.full((rows,), 17, dtype=torch.int32),
        )
    weights = dist_probs(level[None], *dist)[0].double()
    counts = torch.bincount(tokens, minlength=vocab)
    kept = weights > 0
    assert counts[~kept].sum() == 0
    expected = weights[kept] / weights.sum() * rows
    assert statistics.chisquare(counts[kept].numpy(), expected.numpy()).pvalue > 1e-3


def test_positions_are_independent() -> None:
    rows, vocab = 100_000, 3
    level = torch.tensor([0.0, 1.0, 0.5]).expand(rows, vocab)
    inv_t, _, cut, tie_id = distribution_stats(level, *plain(rows))
    one = torch.ones(rows, dtype=torch.int32)
    with use_backend(FAST):
        first, second = (
            replay_sample(level, inv_t, cut, tie_id, torch.arange(rows), position) for position in (one, one + 1)
        )
    table = torch.bincount(first * vocab + second, minlength=vocab * vocab).view(vocab, vocab)
    assert statistics.chi2_contingency(table.numpy()).pvalue > 1e-3


@pytest.mark.parametrize("distance", [0.0, 0.3, 2.0])
def test_shared_noise_couples_two_distributions(distance: float) -> None:
    rows, vocab = 40_000, 12
    p_level = torch.randn(vocab)
    q_level = p_level + torch.randn(vocab) * distance
    seeds, positions = torch.arange(rows), torch.zeros(rows, dtype=torch.int32)
    tokens = []
    with use_backend(FAST):
        for level in (p_level, q_level):
            matrix = level.expand(rows, vocab)
            inv_t, _, cut, tie_id = distribution_stats(matrix, *plain(rows))
            tokens.append(replay_sample(matrix, inv_t, cut, tie_id, seeds, positions))
    agreement = (tokens[0] == tokens[1]).double().mean().item()
    variation = 0.5 * (p_level.softmax(0) - q_level.softmax(0)).abs().sum().item()
    assert agreement >= (1 - variation) / (1 + variation) - 4 * (0.25 / rows) ** 0.5
    if distance == 0:
        assert agreement == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_greedy_broken_and_tied_rows(backend: str) -> None:
    level = torch.tensor([[0.0, 2.0, 2.0], [1.0, float("nan"), 5.0], [-INF, -INF, -INF], [4.0, 4.0, 4.0]])
    t = torch.tensor([0.0, 1.0, 1.0, 1.0])
    with use_backend(backend):
        inv_t, _, cut, tie_id = distribution_stats(level, t, *plain(4)[1:])
        tokens = replay_sample(
            level, inv_t, cut, tie_id, torch.arange(4), torch.zeros(4, dtype=torch.int32), torch.zeros(4, 3)
        )
    assert tokens.tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_bad_arguments_are_named(backend: str) -> None:
    level = torch.zeros(2, 3)
    inv_t, _, cut, tie_id = distribution_stats(level, *plain(2))
    seeds, positions = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int32)
    with use_backend(backend):
        with pytest.raises(ValueError, match=r"positions.*torch.int32"):
            replay_sample(level, inv_t, cut, tie_id, seeds, positions.long())
        with pytest.raises(ValueError, match=r"seeds.*shape"):
            replay_sample(level, inv_t, cut, tie_id, seeds[:1], positions)
        with pytest.raises(ValueError, match=r"noise.*shape"):
            replay_sample(level, inv_t, cut, tie_id, seeds, positions, torch.zeros(2, 4))
        with pytest.raises(ValueError, match=r"inv_t.*torch.float64"):
            replay_sample(level.double(), inv_t, cut, tie_id, seeds, positions)
