"""The definition of randomness: known-answer tests, accuracy, distributions, and the C++ noise bit by bit."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

from specdec_kernels import random
from specdec_kernels.dispatch import extension
from specdec_kernels.random import (
    BLOCK,
    exponential,
    gumbel,
    philox,
    replay_noise,
    sample_from_weights,
    span_words,
    uniform,
    words,
)

needs_extension = pytest.mark.skipif(extension.unavailable_reason() is not None, reason="CPU extension not built")

# Known answers of Philox4x32-10 (Random123, kat_vectors).
KNOWN = [
    ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, -1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        0x299F31D0A4093822,
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
EDGES = torch.tensor([0, 1, 2, 2**24, 2**29 - 1, 2**29, 2**29 + 1, 2**31, 2**32 - 2, 2**32 - 1])


def some_words(count: int = 500_000) -> torch.Tensor:
    return torch.cat([torch.randint(0, 2**32, (count,)), EDGES, torch.arange(1000)])


@pytest.mark.parametrize(("counter", "seed", "expected"), KNOWN)
def test_philox_passes_the_known_answer_tests(counter: tuple[int, ...], seed: int, expected: tuple[int, ...]) -> None:
    assert tuple(int(word) for word in philox(*counter, seed)) == expected


def test_words_pick_the_token_word_of_its_counter() -> None:
    tokens = torch.arange(11)
    got = words(7, 3, 2, 1, tokens)
    for token in tokens.tolist():
        assert got[token] == philox(token >> 2, 3, 2, 1, 7)[token & 3]
    assert torch.equal(got, span_words(torch.tensor([7]), torch.tensor([3]), 2, 1, 11)[0])


def test_every_part_of_the_counter_is_used() -> None:
    base = words(5, 6, 7, 1, torch.arange(64))
    others = [(6, 6, 7, 1), (5, 7, 7, 1), (5, 6, 8, 1), (5, 6, 7, 2), (5 + 2**32, 6, 7, 1), (-5, 6, 7, 1)]
    for seed, position, index, stream in others:
        assert (words(seed, position, index, stream, torch.arange(64)) != base).all()


def test_exponential_is_accurate_at_both_ends() -> None:
    w = some_words()
    exact = -torch.log1p(-(w.double() + 0.5) * 2.0**-32)
    error = (exponential(w).double() - exact).abs() / exact
    assert error[w < 2**29].max() < 2e-7
    assert error.max() < 5e-7  # words above lose their last bits when they become float32
    assert exponential(torch.tensor([0])).item() == 2.0**-33


def test_gumbel_is_accurate() -> None:
    w = some_words()
    exact = -(-torch.log1p(-(w.double() + 0.5) * 2.0**-32)).log()
    assert ((gumbel(w).double() - exact).abs() <= 1.2e-6 + 5e-8 * exact.abs()).all()
    assert torch.isfinite(gumbel(EDGES)).all()


def test_uniform_stays_inside_the_open_interval() -> None:
    u = uniform(EDGES)
    assert u.min() == 2.0**-24 and u.max() == 1 - 2.0**-24


def test_moments_of_keyed_noise() -> None:
    count = 400_000
    w = span_words(torch.tensor([11]), torch.tensor([12]), 13, random.DRAFT, count)[0]
    assert stats.kstest(exponential(w).double().numpy(), "expon").pvalue > 1e-3
    assert stats.kstest(gumbel(w).double().numpy(), "gumbel_r").pvalue > 1e-3
    assert stats.kstest(uniform(w).double().numpy(), "uniform").pvalue > 1e-3
    assert gumbel(w).double().var().item() == pytest.approx(math.pi**2 / 6, rel=0.02)


@needs_extension
@pytest.mark.parametrize("seed", [0, 1, -1, 2**40 + 17, -(2**63)])
@pytest.mark.parametrize("stream", range(6))
def test_noise_of_the_extension_has_the_same_bits(seed: int, stream: int) -> None:
    count, position, index = 1029, 2**31 - 5, 3
    w = span_words(torch.tensor([seed]), torch.tensor([position]), index, stream, count)[0]
    expected = [w, exponential(w), gumbel(w), uniform(w), gumbel(w)]
    for kind, noise in enumerate(expected):
        got = torch.ops.specdec.noise(torch.empty(0), seed, position, index, stream, count, kind)
        assert torch.equal(got, noise), f"kind {kind}"


@needs_extension
def test_noise_of_the_extension_on_many_words() -> None:
    count = 200_003
    got = torch.ops.specdec.noise(torch.empty(0), 99, 5, 0, random.REPLAY, count, 4)
    assert torch.equal(got, replay_noise(torch.tensor([99]), torch.tensor([5], dtype=torch.int32), count)[0])


def test_sample_from_weights_has_the_distribution_of_the_weights() -> None:
    rows = 40_000
    weights = torch.tensor([0.0, 3.0, 1.0, 0.0, 0.5, 5.5])
    position, index = torch.zeros(rows, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32)
    tokens = sample_from_weights(weights.expand(rows, -1), torch.arange(rows), position, index)
    counts = torch.bincount(tokens, minlength=6)
    assert counts[0] == counts[3] == 0
    kept = weights > 0
    expected = weights[kept] / weights.sum() * rows
    assert stats.chisquare(counts[kept].numpy(), expected.numpy()).pvalue > 1e-3


def test_sample_from_weights_across_blocks() -> None:
    rows, vocab = 1200, 2 * BLOCK + 10
    weights = torch.zeros(vocab)
    weights[5], weights[BLOCK + 1], weights[2 * BLOCK + 9] = 1.0, 2.0, 5.0
    zeros = torch.zeros(rows, dtype=torch.int32)
    tokens = sample_from_weights(weights.expand(rows, -1), torch.arange(rows), zeros, zeros, random.DRAFT)
    counts = [int((tokens == v).sum()) for v in (5, BLOCK + 1, 2 * BLOCK + 9)]
    assert sum(counts) == rows
    assert stats.chisquare(counts, [rows / 8, rows / 4, rows * 5 / 8]).pvalue > 1e-3


def test_sample_from_weights_without_any_weight_gives_token_zero() -> None:
    zeros = torch.zeros(2, dtype=torch.int32)
    assert sample_from_weights(torch.zeros(2, 3000), torch.arange(2), zeros, zeros).tolist() == [0, 0]
