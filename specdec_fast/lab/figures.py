"""Plots: observed frequencies beside the laws (experiment B), and the six figures of the proof (experiment C).

Every function returns a PNG as bytes. Colours are told apart without red and green. Tests: tests/lab/test_figures.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from io import BytesIO
from typing import Any, TypeVar, cast

import numpy as np

from specdec_fast.lab.statistics import Z_999, Spread, intervals, z_scores

BASE, DRAFT, SEEN = "#3b6fb6", "#4da77a", "#e08a2e"
ACCEPTED, REJECTED, MISSING, INK = "#4da77a", "#c8553d", "#f2c14e", "#22303c"
BARS = 24

_STYLE: dict[Any, Any] = {
    "figure.dpi": 110,
    "font.size": 9.5,
    "font.family": "DejaVu Sans",
    "axes.edgecolor": "#8795a1",
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": "#e3e8ec",
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


def token_label(token: int, decode: Callable[[int], str] | None) -> str:
    """A token as a short tick label, spaces and control characters made visible."""
    if decode is None:
        return str(token)
    text = decode(token)
    if len(text) > 2 and not text.strip(" "):
        return f"\u00b7\u00d7{len(text)}"
    shown = "".join({" ": "\u00b7", "\n": "\\n", "\t": "\\t"}.get(c, c if c.isprintable() else "\ufffd") for c in text)
    shown = shown.replace("$", r"\$")  # matplotlib would read it as mathematics
    return shown if len(shown) <= 9 else shown[:8] + "\u2026"


Drawn = TypeVar("Drawn", bound=Callable[..., Any])


def _styled(draw: Drawn) -> Drawn:
    """Draw with the style of this module, without a display and without touching the caller's settings."""

    @wraps(draw)
    def styled(*args: Any, **kwargs: Any) -> Any:
        import matplotlib

        with matplotlib.rc_context({"backend": "Agg", **_STYLE}):
            return draw(*args, **kwargs)

    return cast(Drawn, styled)


def _figure(width: float, height: float, **layout: Any) -> tuple[Any, Any]:
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(width, height), layout="constrained", **layout)


def _png(figure: Any) -> bytes:
    from matplotlib import pyplot

    buffer = BytesIO()
    figure.savefig(buffer, format="png", facecolor="white")
    pyplot.close(figure)
    return buffer.getvalue()


def shown_bars(p: np.ndarray, most: int = BARS) -> np.ndarray:
    """The stated set of bars: the likeliest tokens of the target's law, int64 [m]."""
    return np.argsort(-p, kind="stable")[: min(most, int((p > 0).sum()))]


@_styled
def observed_chart(
    title: str,
    p: np.ndarray,
    q: np.ndarray | None,
    counts: np.ndarray,
    spread: Spread,
    decode: Callable[[int], str] | None = None,
) -> bytes:
    """Base law, draft law and observed frequency with 99.9% intervals, and the z-score of every bar below.

    p, q: float64 [V] (q may be None); counts: int64 [V]. The last bar is all other tokens together.
    """
    bars = shown_bars(p)
    total = int(counts.sum())

    def with_rest(values: np.ndarray) -> np.ndarray:
        rest = max(values.sum() - values[bars].sum(), 0)
        return np.append(values[bars], rest) if len(bars) < len(p) else values[bars]

    law, seen = with_rest(p), with_rest(counts)
    low, high = intervals(seen.astype(np.int64))
    frequency = seen / total
    figure, (top, below) = _figure(11.5, 5.4, nrows=2, sharex=True, height_ratios=[3, 1.25])
    x = np.arange(len(law))
    series = [(law, BASE, "base law p")]
    if q is not None:
        series.append((with_rest(q), DRAFT, "draft law q"))
    width = 0.84 / (len(series) + 1)
    left = x - 0.42 + width / 2
    for at, (values, colour, label) in enumerate(series):
        top.bar(left + at * width, values, width, color=colour, label=label, linewidth=0)
    place = left + len(series) * width
    top.bar(place, frequency, width, color=SEEN, label=f"observed, {total:,} draws", linewidth=0)
    error = np.vstack([np.maximum(frequency - low, 0), np.maximum(high - frequency, 0)])
    top.errorbar(place, frequency, error, fmt="none", ecolor=INK, elinewidth=0.9, capsize=2, label="99.9% interval")
    top.set_title(title)
    top.set_ylabel("probability")
    top.legend(loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0.1, ncols=4)
    single = float(max(high[: len(bars)].max(), *(values[: len(bars)].max() for values, *_ in series)))
    limit = single * 1.3
    top.set_ylim(0, limit)
    if len(law) > len(bars):  # one tall bar must not flatten all others: cut it off and say how tall it is
        for at, values in enumerate([*(values for values, *_ in series), frequency]):
            if values[-1] > limit:
                top.text(
                    left[-1] + at * width,
                    limit * 0.98,
                    f"{values[-1]:.3f}",
                    rotation=90,
                    color="white",
                    ha="center",
                    va="top",
                    fontsize=7.5,
                )
    z = z_scores(seen.astype(np.int64), law / law.sum())
    limit = max(4.4, float(np.abs(z[np.isfinite(z)]).max(initial=0)) * 1.1)
    below.axhspan(-Z_999, Z_999, color="#eef2f5", zorder=0)
    below.axhline(0, color=INK, linewidth=0.7)
    outside = np.abs(z) > Z_999
    shown = np.clip(np.nan_to_num(z, posinf=limit, neginf=-limit), -limit, limit)
    below.bar(x, shown, 0.55, color=[REJECTED if bad else "#7d93a6" for bad in outside])
    below.set_ylim(-limit, limit)
    below.set_ylabel("z-score")
    below.text(0.995, 0.04, "band: 99.9%", transform=below.transAxes, ha="right", va="bottom", fontsize=8.5)
    labels = [token_label(int(token), decode) for token in bars] + (["(rest)"] if len(law) > len(bars) else [])
    below.set_xticks(x, labels, rotation=55, ha="right", rotation_mode="anchor")
    below.set_xlim(-0.7, len(law) - 0.3)
    words = (
        f"spread over the {spread.bars} single bars: {spread.observed:.3e}, expected {spread.expected:.3e}, "
        f"99.9% band {spread.low:.3e} to {spread.high:.3e}"
    )
    figure.supxlabel(words, fontsize=9.5)
    return _png(figure)


# -- the six figures of the proof -----------------------------------------------------------------------------------


class Curves:
    """p and q as densities over s = ln(p / q), the tokens' log-ratio. p, q: float64 [V].

    Two weights of one token differ by the factor e^s, so the densities do so at every s: they cross at s = 0, to the
    left the draft gives too much, to the right too little. Smoothed with a Gaussian kernel of width h in a way that
    keeps this factor and both areas: q_i N(s; s_i - h^2 / 2, h), and e^s times it. The extreme 0.4% of the mass, and
    tokens that one law lacks, stand at the ends.
    """

    def __init__(self, p: np.ndarray, q: np.ndarray) -> None:
        alive = (p > 0) | (q > 0)
        p, q = p[alive], q[alive]
        with np.errstate(divide="ignore"):
            s = np.clip(np.log(p) - np.log(q), -60, 60)
        weight = (p + q) / 2
        order = np.argsort(s)
        cumulated = np.cumsum(weight[order])
        low, high = (float(s[order][np.searchsorted(cumulated, share * cumulated[-1])]) for share in (0.002, 0.998))
        s = np.clip(s, min(low, -0.3), max(high, 0.3))
        deviation = float(np.sqrt((weight * (s - (weight * s).sum()) ** 2).sum()))
        width = min(max(0.22 * deviation, 0.03), 0.4)
        self.s = np.linspace(s.min() - 3.5 * width - width**2 / 2, s.max() + 3.5 * width, 800)
        kernel = np.exp(-0.5 * ((self.s[:, None] - s[None, :] + width**2 / 2) / width) ** 2)
        kernel /= width * np.sqrt(2 * np.pi)
        self.q = kernel @ np.where(s > 0, p * np.exp(-s), q)  # what lies at a clipped end keeps its larger weight
        self.p = self.q * np.exp(self.s)
        self.both = np.minimum(self.p, self.q)
        self.accept = np.minimum(1.0, np.exp(self.s))


@_styled
def proof_figures(
    p: np.ndarray, q: np.ndarray, decode: Callable[[int], str] | None = None, where: str = ""
) -> list[tuple[str, str, bytes]]:
    """The article's six figures from real laws p and q, float64 [V]: (name, caption, PNG) of each."""
    curves, bars = Curves(p, q), np.argsort(-np.maximum(p, q), kind="stable")[:18]
    bars = bars[np.argsort((p - q)[bars], kind="stable")]
    overlap = float(np.minimum(p, q).sum())
    labels = [token_label(int(token), decode) for token in bars]
    at = f" ({where})" if where else ""
    ends = f"{overlap:.3f} + {1 - overlap:.3f} = 1"
    return [
        ("1-curves", f"Draft law q and base law p{at}, as densities of ln(p/q).", _curves(curves)),
        ("2-bars", "The same two laws, token by token: the 18 likeliest.", _bars(p, q, bars, labels)),
        (
            "3-areas",
            f"Accepted: min(p, q), area {overlap:.3f}. Rejected, q above p, and missing, p above q: {1 - overlap:.3f} "
            "each, because both laws have area 1.",
            _pair(curves, p, q, bars, labels, _areas),
        ),
        (
            "4-accepted",
            "Branch I: drafted with q(x), accepted with min(1, p(x)/q(x)). The product is min(p, q).",
            _accepted(curves, p, q, bars, labels),
        ),
        (
            "5-rejected",
            f"Branch II: rejected with chance {1 - overlap:.3f}, then drawn from the normalised (p - q)+. The product "
            "is (p - q)+.",
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
    axis.set_xlabel("ln(p / q): draft too eager  \u2190   \u2192  draft too shy")
    axis.set_ylabel("probability density")


def _ticks(axis: Any, labels: Sequence[str]) -> None:
    axis.set_xticks(np.arange(len(labels)), labels, rotation=55, ha="right", rotation_mode="anchor")
    axis.set_xlim(-0.7, len(labels) - 0.3)
    axis.set_ylabel("probability")


def _curves(curves: Curves) -> bytes:
    figure, axis = _figure(7.2, 3.7)
    for values, colour, label in ((curves.q, DRAFT, "draft law q"), (curves.p, BASE, "base law p")):
        axis.plot(curves.s, values, color=colour, linewidth=2, label=label)
        axis.fill_between(curves.s, values, color=colour, alpha=0.13, linewidth=0)
    axis.axvline(0, color=INK, linewidth=0.8, linestyle=":")
    _axes(axis, curves)
    axis.legend()
    return _png(figure)


def _bars(p: np.ndarray, q: np.ndarray, bars: np.ndarray, labels: Sequence[str]) -> bytes:
    figure, axis = _figure(7.2, 3.7)
    x = np.arange(len(bars))
    axis.bar(x - 0.2, q[bars], 0.4, color=DRAFT, label="draft law q")
    axis.bar(x + 0.2, p[bars], 0.4, color=BASE, label="base law p")
    _ticks(axis, labels)
    axis.legend()
    return _png(figure)


def _pair(
    curves: Curves, p: np.ndarray, q: np.ndarray, bars: np.ndarray, labels: Sequence[str], paint: Callable[..., None]
) -> bytes:
    """Curves on the left, bars of single tokens on the right, painted alike."""
    figure, (left, right) = _figure(11.5, 3.9, ncols=2)
    paint(left, curves.s, curves.p, curves.q, curves.both, True)
    _axes(left, curves)
    x = np.arange(len(bars))
    paint(right, x, p[bars], q[bars], np.minimum(p, q)[bars], False)
    _ticks(right, labels)
    left.legend(fontsize=8.5)
    return _png(figure)


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
    """An axis for chances at the right of one for densities."""
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
    figure, (left, right) = _figure(11.5, 3.9, ncols=2)
    left.plot(curves.s, curves.q, color=DRAFT, linewidth=1.8, label="q: drafted")
    left.plot(curves.s, curves.both, color=INK, linewidth=1.8, label="product: min(p, q)")
    left.fill_between(curves.s, curves.both, color=ACCEPTED, alpha=0.35, linewidth=0)
    _axes(left, curves)
    rate = _chances(left, "chance of acceptance")
    rate.plot(curves.s, curves.accept, color=REJECTED, linewidth=1.5, linestyle="--", label="min(1, p/q): accepted")
    _legend_above(left, rate, 3)
    x = np.arange(len(bars))
    right.bar(x, q[bars], 0.72, color=DRAFT, alpha=0.3, label="q: drafted")
    right.bar(x, np.minimum(p, q)[bars], 0.72, color=ACCEPTED, label="accepted part: min(p, q)")
    _ticks(right, labels)
    right.legend(fontsize=8.5)
    return _png(figure)


def _rejected(
    curves: Curves, p: np.ndarray, q: np.ndarray, bars: np.ndarray, labels: Sequence[str], overlap: float
) -> bytes:
    figure, (left, right) = _figure(11.5, 3.9, ncols=2)
    rest = np.maximum(curves.p - curves.both, 0)
    chance = max(1 - overlap, 1e-12)
    left.plot(
        curves.s, rest / chance, color=MISSING, linewidth=2, label="(p \u2212 q)+ normalised: drawn after a rejection"
    )
    left.plot(curves.s, rest, color=INK, linewidth=1.6, label="product: (p \u2212 q)+")
    left.fill_between(curves.s, rest, color=MISSING, alpha=0.45, linewidth=0)
    _axes(left, curves)
    rate = _chances(left, "chance of a rejection")
    rate.axhline(chance, color=REJECTED, linewidth=1.5, linestyle="--", label=f"rejected: {1 - overlap:.3f}")
    _legend_above(left, rate, 2)
    x = np.arange(len(bars))
    gap = np.maximum(p - q, 0)[bars]
    right.bar(x - 0.2, gap / chance, 0.4, color=MISSING, alpha=0.55, label="(p \u2212 q)+ normalised")
    right.bar(x + 0.2, gap, 0.4, color=MISSING, edgecolor=INK, linewidth=0.6, label="product: (p \u2212 q)+")
    _ticks(right, labels)
    right.legend(fontsize=8.5)
    return _png(figure)


@_styled
def accepted_chart(rows: Sequence[tuple[str, float, float]]) -> bytes:
    """Mean accepted tokens per step of each rule: (name, mean, half-width of its 99.9% interval)."""
    figure, axis = _figure(7.2, 0.55 + 0.42 * len(rows))
    names = [name for name, *_ in rows]
    means = [mean for _, mean, _ in rows]
    y = np.arange(len(rows))[::-1]
    axis.barh(y, means, 0.6, color=BASE)
    axis.errorbar(means, y, xerr=[half for *_, half in rows], fmt="none", ecolor=INK, capsize=2, elinewidth=0.9)
    for place, mean in zip(y, means):
        axis.text(0.02 * max(means), place, f"{mean:.3f}", va="center", color="white", fontsize=9)
    axis.set_yticks(y, names)
    axis.set_xlabel("accepted draft tokens per step")
    axis.grid(True, axis="x")
    axis.grid(False, axis="y")
    return _png(figure)
