"""Plots of observed frequencies next to the distributions (experiment B), and of accepted tokens by rule.

Charts are returned as PNG bytes. The colours can be distinguished without red and green.
Tests: tests/lab/test_plots.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from io import BytesIO
from typing import Any, TypeVar, cast

import numpy as np

from specdec_fast.lab.count_distances import Spread
from specdec_fast.lab.statistics import Z_999, intervals, z_scores

BASE, DRAFT, SEEN = "#3b6fb6", "#4da77a", "#e08a2e"
OUTSIDE, INK = "#c8553d", "#22303c"
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
    """Returns a short tick label of a token. Spaces and control characters are made visible."""
    if decode is None:
        return str(token)
    text = decode(token)
    if len(text) > 2 and not text.strip(" "):
        return f"\u00b7\u00d7{len(text)}"
    shown = "".join({" ": "\u00b7", "\n": "\\n", "\t": "\\t"}.get(c, c if c.isprintable() else "\ufffd") for c in text)
    shown = shown.replace("$", r"\$")  # otherwise matplotlib starts mathematics mode
    return shown if len(shown) <= 9 else shown[:8] + "\u2026"


_Plot = TypeVar("_Plot", bound=Callable[..., Any])


def styled(draw: _Plot) -> _Plot:
    """Decorates a plot function: it uses the style of this module and no display. Global settings do not change."""

    @wraps(draw)
    def styled(*args: Any, **kwargs: Any) -> Any:
        import matplotlib

        with matplotlib.rc_context({"backend": "Agg", **_STYLE}):
            return draw(*args, **kwargs)

    return cast(_Plot, styled)


def new_figure(width: float, height: float, **layout: Any) -> tuple[Any, Any]:
    """Returns a figure and its axes. The size is in inches; `layout` goes to `pyplot.subplots`."""
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(width, height), layout="constrained", **layout)


def as_png(figure: Any) -> bytes:
    """Renders a figure as PNG and closes it."""
    from matplotlib import pyplot

    buffer = BytesIO()
    figure.savefig(buffer, format="png", facecolor="white")
    pyplot.close(figure)
    return buffer.getvalue()


def shown_bars(p: np.ndarray, most: int = BARS) -> np.ndarray:
    """Returns the tokens that get a bar: the likeliest of the target's distribution, int64 [m]."""
    return np.argsort(-p, kind="stable")[: min(most, int((p > 0).sum()))]


def with_rest(values: np.ndarray, bars: np.ndarray) -> np.ndarray:
    """Returns the values of the bars, followed by the sum of all other tokens if there are any."""
    rest = max(values.sum() - values[bars].sum(), 0)
    return np.append(values[bars], rest) if len(bars) < len(values) else values[bars]


def bar_scores(p: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Returns the z-score of every bar of `observed_chart`, from p float64 [V] and counts int64 [V]."""
    bars = shown_bars(p)
    dist = with_rest(p, bars)
    return np.asarray(z_scores(with_rest(counts, bars).astype(np.int64), dist / dist.sum()))


def _cut_off(axis: Any, x: float, width: float, value: float, limit: float) -> None:
    """Mark a bar that is taller than its axis: two white slashes, and how tall it is."""
    for height in (0.76, 0.79):
        axis.plot([x - width / 2, x + width / 2], [height * limit, (height + 0.02) * limit], color="white", linewidth=2)
    look: dict[str, Any] = {"rotation": 90, "color": "white", "ha": "center", "va": "top", "fontsize": 7.5}
    axis.text(x, limit * 0.98, f"{value:.3f}", **look)


@styled
def observed_chart(
    title: str,
    p: np.ndarray,
    q: np.ndarray | None,
    counts: np.ndarray,
    spread: Spread,
    decode: Callable[[int], str] | None = None,
) -> bytes:
    """Plots distributions and observed frequencies with 99.9% intervals, and the z-score of every bar below.

    The last bar is the sum of all other tokens. It is cut off if it is taller than the axis.

    Args:
        title: Title of the chart.
        p: Base distribution, float64 [V].
        q: Draft distribution, float64 [V], or None.
        counts: Observed counts, int64 [V].
        spread: Spread over the single bars, for the caption.
        decode: Converts a token to text for its label. None labels tokens by id.

    Returns:
        The chart as PNG.
    """
    bars = shown_bars(p)
    total = int(counts.sum())
    dist, seen = with_rest(p, bars), with_rest(counts, bars)
    low, high = intervals(seen.astype(np.int64))
    frequency = seen / total
    figure, (top, below) = new_figure(11.5, 5.4, nrows=2, sharex=True, height_ratios=[3, 1.25])
    x = np.arange(len(dist))
    series = [(dist, BASE, "base distribution p")]
    if q is not None:
        series.append((with_rest(q, bars), DRAFT, "draft distribution q"))
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
    rest = "(rest)"
    if len(dist) > len(bars):  # a tall last bar must not flatten the others
        for at, values in enumerate([*(values for values, *_ in series), frequency]):
            if values[-1] > limit:
                _cut_off(top, left[-1] + at * width, width, values[-1], limit)
                rest = "(rest, cut)"
    z = bar_scores(p, counts)
    limit = max(4.4, float(np.abs(z[np.isfinite(z)]).max(initial=0)) * 1.1)
    below.axhspan(-Z_999, Z_999, color="#eef2f5", zorder=0)
    below.axhline(0, color=INK, linewidth=0.7)
    outside = np.abs(z) > Z_999
    shown = np.clip(np.nan_to_num(z, posinf=limit, neginf=-limit), -limit, limit)
    below.bar(x, shown, 0.55, color=[OUTSIDE if bad else "#7d93a6" for bad in outside])
    below.set_ylim(-limit, limit)
    below.set_ylabel("z-score")
    words = "band: 99.9%; red: outside of it (by chance, one bar in 1,000)"
    below.text(0.995, 0.04, words, transform=below.transAxes, ha="right", va="bottom", fontsize=8.5)
    labels = [token_label(int(token), decode) for token in bars] + ([rest] if len(dist) > len(bars) else [])
    below.set_xticks(x, labels, rotation=55, ha="right", rotation_mode="anchor")
    below.set_xlim(-0.7, len(dist) - 0.3)
    words = (
        f"spread over the {spread.bars} single bars: {spread.observed:.3e}, expected {spread.expected:.3e}, "
        f"99.9% band {spread.low:.3e} to {spread.high:.3e}"
    )
    figure.supxlabel(words, fontsize=9.5)
    return as_png(figure)


@styled
def accepted_chart(groups: Sequence[tuple[str, Sequence[tuple[str, float, float]]]]) -> bytes:
    """Plots mean accepted tokens per step, with one panel for each group of comparable rules.

    Args:
        groups: Title and rows of each panel, from top to bottom. A row is (name, mean, half-width of its 99.9%
            interval).

    Returns:
        The chart as PNG.
    """
    sizes = [len(rows) for _, rows in groups]
    figure, axes = new_figure(7.2, 0.9 * len(groups) + 0.42 * sum(sizes), nrows=len(groups), height_ratios=sizes)
    for axis, (title, rows) in zip(np.atleast_1d(axes), groups):
        means = [mean for _, mean, _ in rows]
        y = np.arange(len(rows))[::-1]
        axis.barh(y, means, 0.6, color=BASE)
        axis.errorbar(means, y, xerr=[half for *_, half in rows], fmt="none", ecolor=INK, capsize=2, elinewidth=0.9)
        for place, mean in zip(y, means):
            axis.text(0.02 * max(means), place, f"{mean:.3f}", va="center", color="white", fontsize=9)
        axis.set_yticks(y, [name for name, *_ in rows])
        axis.set(title=title, xlabel="accepted draft tokens per step; whiskers: 99.9%")
        axis.grid(True, axis="x")
        axis.grid(False, axis="y")
    return as_png(figure)
