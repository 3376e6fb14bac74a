"""Figures are pictures of what they are given, and the curves keep what the proof is about."""

from __future__ import annotations

import numpy as np
import pytest

from specdec_fast.lab.count_distances import spread
from specdec_fast.lab.plots import accepted_chart, bar_scores, observed_chart, shown_bars, token_label
from specdec_fast.lab.proof_figures import Curves, proof_figures

SOURCE = np.random.default_rng(0)
P, Q = SOURCE.dirichlet(np.full(300, 0.2)), SOURCE.dirichlet(np.full(300, 0.2))
NEAR = P * np.exp(0.5 * SOURCE.standard_normal(300))
NEAR /= NEAR.sum()


def is_picture(png: bytes) -> bool:
    """A PNG of some size that is not of one colour."""
    from io import BytesIO

    from matplotlib.image import imread

    pixels = imread(BytesIO(png))
    return pixels.shape[0] > 150 and pixels.shape[1] > 500 and float(pixels[..., :3].std()) > 0.02


@pytest.mark.parametrize("q", [NEAR, Q])
def test_the_curves_have_area_one_cross_at_zero_and_overlap(q: np.ndarray) -> None:
    curves = Curves(P, q)
    step = curves.s[1] - curves.s[0]
    assert curves.p.sum() * step == pytest.approx(1, abs=0.02) and curves.q.sum() * step == pytest.approx(1, abs=0.02)
    assert np.allclose(curves.p, curves.q * np.exp(curves.s))
    both = float(curves.both.sum() * step)
    assert both == pytest.approx(np.minimum(P, q).sum(), abs=0.06)


def test_distributions_with_zeros_and_equal_distributions_can_be_drawn() -> None:
    p = P.copy()
    p[:100] = 0
    p /= p.sum()
    apart = np.where(np.arange(300) < 100, P, 0)
    for pair in ((p, NEAR), (NEAR, p), (P, P), (p, apart / apart.sum())):
        curves = Curves(*pair)
        assert np.isfinite(curves.p).all() and np.isfinite(curves.q).all()
        assert -12 < curves.s[0] < 0 < curves.s[-1] < 12, "an axis that shows what lies between"
        step = curves.s[1] - curves.s[0]
        assert curves.p.sum() * step == pytest.approx(1, abs=0.02) == curves.q.sum() * step
    assert len(proof_figures(p, NEAR)) == 6


def test_there_are_six_figures_and_they_say_their_numbers() -> None:
    found = proof_figures(P, NEAR, lambda token: f"t{token}$", "here")
    assert [name[0] for name, *_ in found] == list("123456")
    assert all(is_picture(png) for *_, png in found)
    overlap = np.minimum(P, NEAR).sum()
    assert f"{overlap:.3f} + {1 - overlap:.3f} = 1" in found[5][1]


def test_the_bar_chart_is_a_picture_with_and_without_a_draft() -> None:
    counts = SOURCE.multinomial(10_000, P)
    own = spread(counts, P, shown_bars(P), trials=100)
    assert is_picture(observed_chart("here", P, NEAR, counts, own, str))
    assert is_picture(observed_chart("here", P, None, counts, own))
    impossible = np.where(np.arange(4) < 2, 0.5, 0.0)
    four = np.array([4, 5, 1, 0])
    assert is_picture(observed_chart("zero", impossible, None, four, spread(four, impossible, [0, 1], trials=10)))


def test_the_bars_are_the_likeliest_tokens() -> None:
    bars = shown_bars(P, 10)
    assert len(bars) == 10 and P[bars].min() >= np.sort(P)[-10]
    assert list(shown_bars(np.array([0.2, 0.0, 0.8]))) == [2, 0]


def test_accepted_chart_is_a_picture() -> None:
    chains, trees = [("a", 2.0, 0.1), ("b", 1.0, 0.1)], [("c", 1.0, 0.1)]
    assert is_picture(accepted_chart([("chains", chains), ("trees", trees)]))
    assert is_picture(accepted_chart([("chains", chains)]))


def test_scores_are_those_of_the_bars_and_of_the_rest() -> None:
    counts = np.round(10_000 * P).astype(np.int64)
    assert np.abs(bar_scores(P, counts)).max() < 0.5 and len(bar_scores(P, counts)) == 25
    likeliest = int(P.argmax())
    counts[likeliest] += 600
    scores = bar_scores(P, counts)
    assert scores[0] > 3 > np.abs(scores[1:-1]).max()
    four = np.full(4, 0.25)
    assert len(bar_scores(four, np.array([1, 2, 3, 4]))) == 4, "there is no rest"


def test_labels_are_short_and_harmless() -> None:
    assert token_label(3, None) == "3"
    assert token_label(3, lambda token: " a\n") == "\u00b7a\\n"
    assert len(token_label(3, lambda token: "x" * 50)) == 9 and token_label(3, lambda token: "    ") == "\u00b7\u00d74"
    assert token_label(3, lambda token: "\x1b[2J") == "\ufffd[2J"
    assert token_label(3, lambda token: "$x$") == r"\$x\$"
