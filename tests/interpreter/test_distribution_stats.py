"""distribution_stats in Triton: cut and tie equal to the reference, the normaliser to rounding, on guarded rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracles.distribution_batches import batches, compare, parameters
from oracles.interpreter import guarded
from torch import Tensor

from specdec_kernels import UnsupportedError, distribution_stats, use_backend
from specdec_kernels.dispatch import extension
from specdec_kernels.ops.distribution_stats import dist_probs

INF = float("inf")
HALF_AND_SINGLE = [torch.float32, torch.bfloat16, torch.float16]
quick = settings(
    max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def both(batch: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Returns the results of Triton and the reference, with masses; Triton's rows are guarded and padded with NaN."""
    logits = guarded(batch[0], row_stride=batch[0].shape[1] + 5)
    with use_backend("triton"):
        got = distribution_stats(logits, *(guarded(part) for part in batch[1:]), masses=True)
    with use_backend("reference"):
        return got, distribution_stats(*batch, masses=True)


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


def spoil_between_launches(monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Tensor], None]) -> None:
    """Makes `spoil` change the logits after their first read."""
    from specdec_kernels.ops.distribution_stats import launch

    real = launch.join_blocks

    class Spoiling:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def run(logits: Tensor, *arguments: Any, **options: Any) -> None:
                spoil(logits)
                real[grid](logits, *arguments, **options)

            return run

    monkeypatch.setattr(launch, "join_blocks", Spoiling())


def test_a_row_is_read_again_only_where_a_filter_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the launches the logits of rows without filters are spoiled, without effect. Those of a row with a
    filter, which is refined further, are needed.
    """
    level = torch.randn(4, 3000) * 3
    batch = (level, *parameters(4, 0.9))
    batch[1][1], batch[3][2] = 0.0, 0.8  # row 1 is greedy, row 2 has top-p
    want = distribution_stats(*batch, masses=True)
    spoiled = [0, 1, 3]

    def spoil(logits: Tensor) -> None:
        logits[spoiled] = torch.nan

    spoil_between_launches(monkeypatch, spoil)
    with use_backend("triton"):
        found = distribution_stats(level.clone(), *batch[1:], masses=True)
        for got, expected in zip(found, want, strict=True):
            torch.testing.assert_close(got, expected, rtol=2e-5, atol=1e-6, equal_nan=True)
        spoiled[:] = [2]
        assert not torch.equal(distribution_stats(level.clone(), *batch[1:])[2], want[2])


def test_masses_are_those_of_the_weights() -> None:
    level = torch.randn(2, 5000).bfloat16() * 4
    level[0, 1024:2048] = -INF
    with use_backend("triton"):
        *stats, mass = distribution_stats(level, *parameters(2), masses=True)
    weights = torch.stack([block.sum(1) for block in dist_probs(level, *stats).split(1024, dim=1)], dim=1)
    torch.testing.assert_close(mass, weights, rtol=1e-5, atol=1e-30)
    assert mass[0, 1] == 0


def test_double_precision_is_refused_with_a_reason() -> None:
    with use_backend("triton"), pytest.raises(UnsupportedError, match="float64 logits"):
        distribution_stats(torch.zeros(1, 3, dtype=torch.float64), *parameters(1))


@quick
@given(batches(HALF_AND_SINGLE), st.data())
def test_pivots_change_nothing(batch: tuple[Tensor, ...], data: st.DataObject) -> None:
    """For all pivots: the last kept token, its neighbours, others, none, or beyond the vocabulary."""
    logits, *parts = batch
    rows, vocab = logits.shape
    with use_backend("reference"):
        want = distribution_stats(*batch)
    ranked = logits.float().nan_to_num(nan=INF).sort(dim=1, descending=True, stable=True)[1]
    picked = []
    for row in range(data.draw(st.integers(0, rows))):
        last = int((ranked[row] == want[3][row]).nonzero()[0, 0])
        place = last + data.draw(st.sampled_from([0, 0, 0, 1, -1]))
        picked.append(data.draw(st.sampled_from([int(ranked[row, min(max(place, 0), vocab - 1)])] * 4 + [-1, vocab])))
    with use_backend("triton"):
        pivots = guarded(torch.tensor(picked, dtype=torch.int64))
        given = guarded(logits), *(guarded(part) for part in parts)
        compare(distribution_stats(*given, pivots=pivots, masses=data.draw(st.booleans()))[:4], want)


@pytest.mark.parametrize("masses", [False, True])
def test_a_row_whose_pivot_is_the_last_kept_is_not_read_again(monkeypatch: pytest.MonkeyPatch, masses: bool) -> None:
    level = torch.randn(6, 3000) * 3
    t, k, p, m = parameters(6, 0.9)
    k[0], p[1], k[2], p[2], m[2], k[3], p[3], p[4], p[5] = 7, 0.8, 40, 0.6, 1e-6, 3, 0.999, 0.8, 0.8
    batch = level, t, k, p, m
    with use_backend("reference"):
        want = distribution_stats(*batch)
    pivots = want[3].long()
    pivots[4] = level[4].argmax() if level[4].argmax() != pivots[4] else level[4].argmin()
    keep = level[:5].gather(1, pivots[:5, None])

    def spoil(logits: Tensor) -> None:
        logits[:4] = torch.nan
        logits[:5].scatter_(1, pivots[:5, None], keep)

    spoil_between_launches(monkeypatch, spoil)
    with use_backend("triton"):
        compare(distribution_stats(level.clone(), *batch[1:], pivots=pivots[:5], masses=masses)[:4], want)


def test_every_pivot_of_small_distributions_with_every_filter() -> None:
    dists = [[0.5, 0.44, 0.06, 0.0], [0.4, 0.3, 0.2, 0.1], [0.0, 0.6, 0.0, 0.4]]
    filters = [(0, 0.55, 0.0), (0, 0.95, 0.0), (0, 0.42, 0.3), (1, 1.0, 0.0), (1, 0.95, 0.0), (2, 1.0, 0.0)]
    filters += [(2, 0.95, 0.0), (2, 0.55, 0.3), (3, 1.0, 0.0), (3, 0.42, 0.0), (3, 0.95, 0.3), (0, 1.0, 0.3)]
    masses, limits, pivots = zip(*itertools.product(dists, filters, range(4)), strict=True)
    k, p, m = zip(*limits, strict=True)
    batch = (
        torch.tensor(masses).log(),
        torch.ones(len(k)),
        torch.tensor(k, dtype=torch.int32),
        torch.tensor(p),
        torch.tensor(m),
    )
    with use_backend("reference"):
        want = distribution_stats(*batch)
    with use_backend("triton"):
        compare(distribution_stats(*batch, pivots=torch.tensor(pivots)), want)


def test_a_pivot_at_the_limit_has_no_effect() -> None:
    """Sums in float32 cannot decide on which side of top-p a token of a flat distribution is; float64 does."""
    places = list(range(300, 2700, 120))
    level = torch.randn(1, 3000, generator=torch.Generator().manual_seed(0)) / 100
    order = level[0].argsort(descending=True)
    share = level[0].double().softmax(0)[order].cumsum(0)
    limits = share[places].float()
    batch = level.expand(len(places), -1), *parameters(len(places))
    batch[3].copy_(limits)
    with use_backend("reference"):
        want = distribution_stats(*batch)
    for beside in (0, 1):
        with use_backend("triton"):
            compare(distribution_stats(*batch, pivots=order[[place + beside for place in places]]), want)


@pytest.mark.parametrize("backend", ["reference", "triton", "cpu"])
def test_bad_pivots_are_refused(backend: str) -> None:
    level, settings = torch.zeros(2, 5), parameters(2, 1.0, 2)
    if backend == "cpu" and extension.unavailable_reason() is not None:
        pytest.skip("CPU extension not built")
    with use_backend(backend):
        with pytest.raises(ValueError, match="pivots has 3 tokens; expected at most one for each of 2 rows"):
            distribution_stats(level, *settings, pivots=torch.zeros(3, dtype=torch.int64))
        with pytest.raises(ValueError, match="pivots"):
            distribution_stats(level, *settings, pivots=torch.zeros(2))
