"""Loss and acceptance of a training run, as numbers and as a plot.

Tests: tests/train/heads/test_parallel_training.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specdec_fast.extras import require


def write_history(history: Sequence[Mapping[str, float]], folder: Path, title: str) -> None:
    """Writes history.json and curve.png; each file is replaced as a whole.

    Raises:
        ValueError: As `training_curve`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / "history.json.partial"
    partial.write_text(json.dumps(history, indent=1) + "\n")
    partial.replace(folder / "history.json")
    training_curve(history, folder / "curve.png", title)


def training_curve(history: Sequence[Mapping[str, float]], path: Path, title: str) -> None:
    """Plots the losses of training and held-out text, and below them all other measurements.

    Args:
        history: Measurements, each with "step".
        path: PNG file, which is replaced as a whole.
        title: Title of the plot.

    Raises:
        ValueError: If the history is empty, or matplotlib is not installed.
    """
    if not history:
        raise ValueError("training curve: got no measures; expected at least one")
    require("train", "training curve", "matplotlib")
    import matplotlib
    from matplotlib import pyplot

    style: dict[Any, Any] = {"backend": "Agg", "font.size": 9.5, "axes.spines.top": False, "axes.spines.right": False}
    with matplotlib.rc_context(style):
        figure, (above, below) = pyplot.subplots(2, 1, figsize=(7.5, 6.0), layout="constrained", sharex=True)
        steps = [entry["step"] for entry in history]
        for name, label in (("loss", "training"), ("held_loss", "held-out")):
            above.plot(steps, [entry.get(name, float("nan")) for entry in history], label=label, marker=".")
        above.set(title=title, ylabel="loss")
        above.legend(frameon=False)
        measures = [name for name in history[-1] if name not in ("step", "loss", "held_loss")]
        rates = [name for name in measures if name != "tokens_per_step"]
        for name in rates:
            below.plot(
                steps, [entry.get(name, float("nan")) for entry in history], label=name.replace("_", " "), marker="."
            )
        below.set(xlabel="step", ylabel="held-out text: share right or accepted")
        if rates:
            below.set_ylim(bottom=0)
            below.legend(frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.partial")
        figure.savefig(partial, dpi=110, facecolor="white", format="png")
        partial.replace(path)
        pyplot.close(figure)
