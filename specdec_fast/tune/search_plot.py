"""Plot of a search for skipped sub-blocks. Tests: tests/tune/test_search_plot.py."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from itertools import accumulate
from typing import Any

from specdec_fast.extras import require
from specdec_fast.tune.skipped_layers_search import Trial


def search_chart(trials: Sequence[Trial], best: Trial, num_layers: int, title: str) -> bytes:
    """Plots the cost of every trial with its noise, the best cost so far, and the sub-blocks that the best skips.

    Args:
        trials: All trials, in order.
        best: The best trial.
        num_layers: Layers of the target.
        title: Title of the plot.

    Returns:
        A PNG.

    Raises:
        ValueError: If there are no trials, or if matplotlib is not installed.
    """
    if not trials:
        raise ValueError("plot: got no trials; expected at least one")
    require("tune", "plot", "matplotlib")
    import matplotlib
    from matplotlib import pyplot

    style: dict[Any, Any] = {"backend": "Agg", "font.size": 9.5, "axes.spines.top": False, "axes.spines.right": False}
    with matplotlib.rc_context(style):
        figure, (above, below) = pyplot.subplots(2, 1, figsize=(7.5, 5.2), layout="constrained", height_ratios=[4, 1])
        numbers, costs = range(1, len(trials) + 1), [trial.cost for trial in trials]
        left_out = [len(trial.skip) / (2 * num_layers) for trial in trials]
        above.errorbar(numbers, costs, [trial.noise for trial in trials], fmt="none", ecolor="#c3ccd4", zorder=1)
        dots = above.scatter(numbers, costs, c=left_out, cmap="cividis", vmin=0, vmax=1, s=26, zorder=2)
        above.step(numbers, list(accumulate(costs, min)), where="post", color="#e08a2e", label="best so far")
        above.axhline(1.0, color="#22303c", linewidth=0.8, linestyle="--", label="plain decoding")
        above.set(title=title, xlabel="trial", ylabel="time per verified token / plain")
        above.xaxis.get_major_locator().set_params(integer=True)
        above.legend(frameon=False)
        figure.colorbar(dots, ax=above, label="share skipped")
        bits = best.skip.bits(num_layers)
        below.imshow([bits[:num_layers], bits[num_layers:]], cmap="Greys", vmin=0, vmax=1.4, aspect="auto")
        below.set_yticks([0, 1], ["attention", "MLP"])
        below.set(xlabel=f"layer (dark: skipped by the best, at {best.cost:.2f})")
        buffer = BytesIO()
        figure.savefig(buffer, format="png", dpi=110, facecolor="white")
        pyplot.close(figure)
    return buffer.getvalue()
