"""law_stats in Triton: cut and tie equal to the reference, the normaliser to rounding, on guarded rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from oracles.interpreter import guarded
from oracles.law_batches import batches, compare, parameters
from torch import Tensor

from specdec_kernels import UnsupportedError, law_stats, use_backend
from specdec_kernels.law_stats import law_weights

INF = float("inf")
HALF_AND_SINGLE = [torch.float32, torch.bfloat16, torch.float16]
quick = settings(
    max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def both(batch: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """(Triton's, the reference's) answer with masses; Triton's rows are guarded and padded with NaN."""
    logits = guarded(batch[0], row_stride=batch[0].shape[1] + 5)
    with use_backend("triton"):
        got = law_stats(logits, *(guarded(part) for part in batch[1:]), masses=True)
    with use_backend("reference"):
        return got, law_stats(*batch, masses=True)


@quick
@given(batches(HALF_AND_SINGLE))
def test_kernel_equals_reference(batch: tuple[Tensor, ...]) -> None:
    (*got, mass), (*want, true_mass) = both(batch)
    compare(got, want)
    torch.testing.assert_close(mass, true_mass, rtol=2e-5, atol=1e-30, equal_nan=True)


@pytest.mark.parametrize(("spread", "vocab"), [(0.1, 30_011), (3.0, 200_003)])
def test_large_vocabularies_and_more_contenders_than_fit(spread: float, vocab: int) -> None:
    """Flat rows have thousands of contenders, rows of ties all of them at one level."""
    level = torch.randn(5, vocab) * spread
    level[1] = (level[1] * 2).round() / 2
    level[2, : vocab // 2] = -INF
    level[3] = 1.0
    t, k, p, m = parameters(5, 0.9)
    k[0], p[1], k[2], p[2], p[3], m[4] = 150, 0.9, 60, 0.9, 0.25, 0.2
    rows = slice(0, 5) if vocab < 100_000 else slice(0, 3)
    (*got, _), (*want, _) = both((level[rows], *(part[rows] for part in (t, k, p, m))))
    compare(got, want)


def test_a_row_is_read_again_only_where_a_filter_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the launches the logits of rows without filters are spoiled: nobody notices. Those of a row with one,
    which goes on to be refined, are needed.
    """
    from specdec_kernels.law_stats import launch

    level = torch.randn(4, 3000) * 3
    batch = (level, *parameters(4, 0.9))
    batch[1][1], batch[3][2] = 0.0, 0.8  # row 1 is greedy, row 2 has top-p
    want = law_stats(*batch, masses=True)
    spoiled, real = [0, 1, 3], launch.join

    class Spoiling:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def run(logits: Tensor, *arguments: Any, **options: Any) -> None:
                logits[spoiled] = torch.nan
                real[grid](logits, *arguments, **options)

            return run

    monkeypatch.setattr(launch, "join", Spoiling())
    with use_backend("triton"):
        found = law_stats(level.clone(), *batch[1:], masses=True)
        for got, expected in zip(found, want, strict=True):
            torch.testing.assert_close(got, expected, rtol=2e-5, atol=1e-6, equal_nan=True)
        spoiled[:] = [2]
        assert not torch.equal(law_stats(level.clone(), *batch[1:])[2], want[2])


def test_masses_are_those_of_the_weights() -> None:
    level = torch.randn(2, 5000).bfloat16() * 4
    level[0, 1024:2048] = -INF
    with use_backend("triton"):
        *stats, mass = law_stats(level, *parameters(2), masses=True)
    weights = torch.stack([block.sum(1) for block in law_weights(level, *stats).split(1024, dim=1)], dim=1)
    torch.testing.assert_close(mass, weights, rtol=1e-5, atol=1e-30)
    assert mass[0, 1] == 0


def test_double_precision_is_refused_with_a_reason() -> None:
    with use_backend("triton"), pytest.raises(UnsupportedError, match="float64 logits"):
        law_stats(torch.zeros(1, 3, dtype=torch.float64), *parameters(1))
