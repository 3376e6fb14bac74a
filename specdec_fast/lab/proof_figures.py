"""The six figures of the losslessness proof (experiment C), from real distributions, as PNG bytes.

Tests: tests/lab/test_plots.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from specdec_fast.lab.plots import BASE, DRAFT, INK, as_png, new_figure, styled, token_label

ACCEPTED, REJECTED, MISSING = "#4da77a", "#c8553d", "#f2c14e"
ABSENT = 5.0
"""Position |ln(p / q)| of a token that one distribution lacks: that distribution then gets e^-5 of its weight."""


class Curves:
    """Distributions p and q as densities over the log-ratio s = ln(p / q) of a token.

    The probabilities of a token differ by the factor e^s, and so do the densities at every s. They cross at s = 0:
    q is larger to the left, p to the right. A Gaussian kernel of width h smooths them and keeps this factor and both
    areas: q_i N(s; s_i - h^2 / 2, h), and e^s times it. The most extreme 0.4% of the mass is moved to the ends. Tokens
    that one distribution lacks are plotted at a ratio of at least e^5.

    Args:
        p: Base distribution, float64 [V].
        q: Draft distribution, float64 [V].
    """

    def __init__(self, p: np.ndarray, q: np.ndarray) -> None:
        alive = (p > 0) | (q > 0)
        p, q = p[alive], q[alive]
        with np.errstate(divide="ignore"):
            s = np.log(p) - np.log(q)
        weight = (p + q) / 2
        low = high = 0.0
        if (both := np.isfinite(s)).any():
            order = np.argsort(s[both])
            cumulated = np.cumsum(weight[both][order])
            low, high = (s[both][order][np.searchsorted(cumulated, share * cumulated[-1])] for share in (0.002, 0.998))
        ends = np.clip(s, min(low, -0.3), max(high, 0.3))
        s = np.where(both, ends, np.clip(s, min(low - 1, -ABSENT), max(high + 1, ABSENT)))
        deviation = float(np.sqrt((weight * (s - (weight * s).sum()) ** 2).sum()))
        width = min(max(0.22 * deviation, 0.03), 0.4)
        self.s = np.linspace(s.min() - 3.5 * width - width**2 / 2, s.max() + 3.5 * width, 800)
        kernel = np.exp(-0.5 * ((self.s[:, None] - s[None, :] + width**2 / 2) / width) ** 2)
        kernel /= width * np.sqrt(2 * np.pi)
        self.q = kernel @ np.where(s > 0, p * np.exp(-s), q)  # a token at a clipped end keeps its larger weight
        self.p = self.q * np.exp(self.s)
        self.both = np.minimum(self.p, self.q)
        self.accept = np.minimum(1.0, np.exp(self.s))


@styled
def proof_figures(
    p: np.ndarray, q: np.ndarray, decode: Callable[[int], str] | None = None, where: str = ""
) -> list[tuple[str, str, bytes]]:
    """Draws the article's six figures.

    Args:
        p: Base distribution, float64 [V].
        q: Draft distribution, float64 [V].
        decode: Converts a token to text for its label. None labels tokens by id.
        where: Name of the position, for the caption.

    Returns:
        (name, caption, PNG) of each figure.
    """
    curves, bars = Curves(p, q), np.argsort(-np.maximum(p, q), kind="stable")[:18]
    bars = bars[np.argsort((p - q)[bars], kind="stable")]
    overlap = float(np.minimum(p, q).sum())
    labels = [token_label(int(token), decode) for token in bars]
    at = f" ({where})" if where else ""
    ends = f"{overlap:.3f} + {1 - overlap:.3f} = 1"
    return [
        ("1-curves", f"Draft distribution q and base distribution p{at}, as densities of ln(p/q).", _curves(curves)),
        ("2-bars", "The same two distributions, token by token: the 18 likeliest.", _bars(p, q, bars, labels)),
        (
            "3-areas",
            f"Accepted: min(p, q), area {overlap:.3f}. Rejected, q above p, and missing, p above q: {1 - overlap:.3f} "
            "each, because both distributions have area 1.",
            _pair(curves, p, q, bars, labels, _areas),
        ),
        (
            "4-accepted",
            "Branch I: drafted with q(x), accepted with min(1, p(x)/q(x)). The product is min(p, q).",
            _accepted(curves, p, q, bars, labels),
        ),
        (
            "5-rejected",
            f"Branch II: rejected with chance {1 - overlap:.3f}, then sampled from the normalised (p - q)+. The "
            "product is (p - q)+.",
            _rejected(curves, p, q, bars, labels, overlap),
        ),
        (
            "6-sum",
            f"Both branches together are p: {ends}.",
            _pair(curves, p, q, bars, labels, _sum),
        ),
    ]


def _axes(axis: Any, curves: Curves) -> None:
    axis.set_xlim(curves.s[0], curves.s[-1])
    axis.set_ylim(bottom=0)
    axis.set_xlabel("ln(p / q): q is larger  \u2190   \u2192  p is larger")
    axis.set_ylabel("probability density")


def _ticks(axis: Any, labels: Sequence[str]) -> None:
    axis.set_xticks(np.arange(len(labels)), labels, rotation=55, ha="right", rotation_mode="anchor")
    axis.set_xlim(-0.7, len(labels) - 0.3)
    axis.set_ylabel("probability")


def _curves(curves: Curves) -> bytes:
    figure, axis = new_figure(7.2, 3.7)
    for values, colour, label in ((curves.q, DRAFT, "draft distribution q"), (curves.p, BASE, "base distribution p")):
        axis.plot(curves.s, values, color=colour, linewidth=2, label=label)
        axis.fill_between(curves.s, values, color=colour, alpha=0.13, linewidth=0)
    axis.axvline(0, color=INK, linewidth=0.8, linestyle=":")
    _axes(axis, curves)
    axis.legend()
    return as_png(figure)


def _bars(p: np.ndarray, q: np.ndarray, bars: np.ndarray, labels: Sequence[str]) -> bytes:
    figure, axis = new_figure(7.2, 3.7)
    x = np.arange(len(bars))
    axis.bar(x - 0.2, q[bars], 0.4, color=DRAFT, label="draft distribution q")
    axis.bar(x + 0.2, p[bars], 0.4, color=BASE, label="base distribution p")
    _ticks(axis, labels)
    axis.legend()
    return as_png(figure)


def _pair(
    curves: Curves, p: np.ndarray, q: np.ndarray, bars: np.ndarray, labels: Sequence[str], paint: Callable[..., None]
) -> bytes:
    """Draws curves on the left and bars of single tokens on the right, with the same `paint` function."""
    figure, (left, right) = new_figure(11.5, 3.9, ncols=2)
    paint(left, curves.s, curves.p, curves.q, curves.both, True)
    _axes(left, curves)
    x = np.arange(len(bars))
    paint(right, x, p[bars], q[bars], np.minimum(p, q)[bars], False)
    _ticks(right, labels)
    left.legend(fontsize=8.5)
    return as_png(figure)


def _layer(axis: Any, x: np.ndarray, low: np.ndarray, high: np.ndarray, smooth: bool, **look: Any) -> None:
    if smooth:
        axis.fill_between(x, low, high, linewidth=0, **look)
    else:
        axis.bar(x, high - low, 0.72, bottom=low, **look)


def _outline(axis: Any, x: np.ndarray, y: np.ndarray, smooth: bool, colour: str, label: str) -> None:
    if smooth:
        axis.plot(x, y, color=colour, linewidth=1.8, label=label)
    else:
        axis.hlines(y, x - 0.36, x + 0.36, color=colour, linewidth=2, label=label)


def _areas(axis: Any, x: np.ndarray, p: np.ndarray, q: np.ndarray, both: np.ndarray, smooth: bool) -> None:
    _layer(axis, x, np.zeros_like(p), both, smooth, color=ACCEPTED, alpha=0.35, label="accepted: min(p, q)")
    _layer(axis, x, both, np.maximum(q, both), smooth, color=REJECTED, alpha=0.75, label="rejected: (q \u2212 p)+")
    _layer(axis, x, both, np.maximum(p, both), smooth, color=MISSING, alpha=0.9, label="missing: (p \u2212 q)+")
    _outline(axis, x, q, smooth, DRAFT, "q")
    _outline(axis, x, p, smooth, BASE, "p")


def _sum(axis: Any, x: np.ndarray, p: np.ndarray, q: np.ndarray, both: np.ndarray, smooth: bool) -> None:
    _layer(axis, x, np.zeros_like(p), both, smooth, color=ACCEPTED, alpha=0.45, label="branch I: min(p, q)")
    _layer(axis, x, both, np.maximum(p, both), smooth, color=MISSING, alpha=0.9, label="branch II: (p \u2212 q)+")
    _outline(axis, x, p, smooth, BASE, "their sum: p")


def _chances(left: Any, label: str) -> Any:
    """Adds an axis for probabilities on the right."""
    right = left.twinx()
    right.set_ylim(0, 1.08)
    right.set_ylabel(label)
    right.grid(False)
    right.spines["right"].set_visible(True)
    return right


def _legend_above(left: Any, right: Any, columns: int) -> None:
    lines = [*left.get_lines(), *right.get_lines()]
    names = [line.get_label() for line in lines]
    left.legend(lines, names, fontsize=8.5, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=columns)


def _accepted(curves: Curves, p: np.ndarray, q: np.ndarray, bars: np.ndarray, labels: Sequence[str]) -> bytes:
    figure, (left, right) = new_figure(11.5, 3.9, ncols=2)
    left.plot(curves.s, curves.q, color=DRAFT, linewidth=1.8, label="q: drafted")
    left.plot(curves.s, curves.both, color=INK, linewidth=1.8, label="product: min(p, q)")
    left.fill_between(curves.s, curves.both, color=ACCEPTED, alpha=0.35, linewidth=0)
    _axes(left, curves)
    rate = _chances(left, "acceptance probability")
    rate.plot(curves.s, curves.accept, color=REJECTED, linewidth=1.5, linestyle="--", label="min(1, p/q): accepted")
    _legend_above(left, rate, 3)
    x = np.arange(len(bars))
    right.bar(x, q[bars], 0.72, color=DRAFT, alpha=0.3, label="q: drafted")
    right.bar(x, np.minimum(p, q)[bars], 0.72, color=ACCEPTED, label="accepted part: min(p, q)")
    _ticks(right, labels)
    right.legend(fontsize=8.5)
    return as_png(figure)


def _rejected(
    curves: Curves, p: np.ndarray, q: np.ndarray, bars: np.ndarray, labels: Sequence[str], overlap: float
) -> bytes:
    figure, (left, right) = new_figure(11.5, 3.9, ncols=2)
    rest = np.maximum(curves.p - curves.both, 0)
    chance = max(1 - overlap, 1e-12)
    left.plot(
        curves.s, rest / chance, color=MISSING, linewidth=2, label="(p \u2212 q)+ normalised: sampled after a rejection"
    )
    left.plot(curves.s, rest, color=INK, linewidth=1.6, label="product: (p \u2212 q)+")
    left.fill_between(curves.s, rest, color=MISSING, alpha=0.45, linewidth=0)
    _axes(left, curves)
    rate = _chances(left, "rejection probability")
    rate.axhline(chance, color=REJECTED, linewidth=1.5, linestyle="--", label=f"rejected: {1 - overlap:.3f}")
    _legend_above(left, rate, 2)
    x = np.arange(len(bars))
    gap = np.maximum(p - q, 0)[bars]
    right.bar(x - 0.2, gap / chance, 0.4, color=MISSING, alpha=0.55, label="(p \u2212 q)+ normalised")
    right.bar(x + 0.2, gap, 0.4, color=MISSING, edgecolor=INK, linewidth=0.6, label="product: (p \u2212 q)+")
    _ticks(right, labels)
    right.legend(fontsize=8.5)
    return as_png(figure)
