"""Masses of tokens as pairs of float32 against float64, and distribution_stats at extreme temperatures."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracles.distribution_batches import compare, parameters
from torch import Tensor

from specdec_kernels import distribution_stats, use_backend

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
exp_difference = import_module("specdec_kernels.triton_shared.float64_masses").exp_difference

COUNT = 1 << 14


@triton.jit
def masses(levels, tops, out, NUMBER: tl.constexpr):
    place = tl.arange(0, NUMBER)
    tl.store(out + place, exp_difference(tl.load(levels + place), tl.load(tops + place)))


def found(levels: Tensor, tops: Tensor) -> Tensor:
    out = torch.full((len(levels),), -1.0, dtype=torch.float64)
    masses[(1,)](levels, tops, out, len(levels))
    return out


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 0.3, 3.0, 30.0, 300.0, 1e5])
def test_masses_are_exponentials_to_43_bits(scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    top = torch.randn(COUNT, generator=generator) * scale
    level = top - torch.rand(COUNT, generator=generator) * min(2 * scale, 690.0)
    want = (level.double() - top.double()).exp()
    inside = level.double() - top.double() > -699.9
    torch.testing.assert_close(found(level, top)[inside], want[inside], rtol=2.0**-43, atol=0.0)


def test_masses_at_extremes() -> None:
    level = torch.tensor([3.5, -2e38, -torch.inf, torch.nan, -701.0, 1e-45, 0.0, -torch.inf])
    top = torch.tensor([3.5, 2e38, 0.0, 0.0, 0.0, 1e-45, 0.0, -torch.inf])
    assert found(level, top).tolist() == [1, 0, 0, 0, 0, 1, 1, 0]


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(0, 2**31), st.sampled_from([3, 17, 1000, 2500]), st.sampled_from([1e-4, 1.0, 8.0, 300.0]),
    st.sampled_from([1e-6, 1e-4, 0.05, 1.0, 40.0, 1e6, 1e30]), st.sampled_from(["k", "p", "m", "kpm"]),
)  # fmt: skip
def test_cuts_at_any_temperature_are_the_references(
    seed: int, vocab: int, spread: float, temperature: float, filters: str
) -> None:
    generator = torch.Generator().manual_seed(seed)
    level = torch.randn(3, vocab, generator=generator) * spread
    level[1] = (level[1] * 4).round() / 4  # ties
    t, k, p, m = parameters(3, temperature)
    if "k" in filters:
        k[:] = torch.randint(1, vocab + 1, (3,), generator=generator)
    if "p" in filters:
        p[:] = torch.rand(3, generator=generator)
        p[2] = 1 - 2.0**-24
    if "m" in filters:
        m[:] = torch.rand(3, generator=generator) ** 4
    with use_backend("reference"):
        want = distribution_stats(level, t, k, p, m)
    with use_backend("triton"):
        got = distribution_stats(level, t, k, p, m)
    compare(got, want)
