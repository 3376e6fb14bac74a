"""Observed first tokens of many draws beside the exact distribution, for a lossless rule and a lossy one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from docs.figures.draw.style import BARS, INK, ORANGE, chart

TITLE = "Observed frequencies beside the target's distribution"
DESCRIPTION = (
    "Twelve tokens. For rejection and recursive_rejection every observed frequency is within its interval around the "
    "target's probability, although the draft's distribution differs. For a lossy rule the frequencies differ."
)
RECORD = Path(__file__).resolve().parents[2] / "data" / "losslessness.json"

VOCAB, SEED, DRAWS, CHUNK = 12, 5, 40_000, 20_000
RULES = ("rejection", "recursive_rejection", "lossy")
Z, OBSERVED = 3.29, "observed, 99.9 % interval"


def record() -> dict[str, Any]:
    """Draws first tokens by each rule from random distributions of target and draft."""
    import numpy as np
    import torch

    from specdec_fast.core.distributions import TokenDistributions
    from specdec_fast.lab.simulator import Simulator, layout_for
    from specdec_fast.rules import get_rule
    from specdec_kernels import distribution_stats

    source = torch.Generator().manual_seed(SEED)
    p = torch.randn(1, VOCAB, generator=source) * 0.8
    q = p + 0.7 * torch.randn(1, VOCAB, generator=source)
    whole = (torch.ones(1), torch.zeros(1, dtype=torch.int32), torch.ones(1), torch.zeros(1))  # T = 1, no filters

    def packed(logits: torch.Tensor) -> TokenDistributions:
        inv_t, lse, cut, tie_id, mass = distribution_stats(logits, *whole, masses=True)
        return TokenDistributions(logits, inv_t, lse, cut, tie_id, mass=mass)

    counts = {}
    for name in RULES:
        rule: Any = get_rule(name)
        simulator = Simulator(rule, packed(p), packed(q), layout_for(rule, VOCAB))
        seen = np.zeros(VOCAB, dtype=np.int64)
        for start in range(0, DRAWS, CHUNK):
            seeds = torch.arange(start, start + CHUNK)
            emitted, _, _ = simulator.step(seeds, torch.full((CHUNK,), 3, dtype=torch.int32))
            seen += np.bincount(emitted[:, 0], minlength=VOCAB)
        counts[name] = seen.tolist()
    exact, draft = (torch.softmax(each.double(), -1)[0].tolist() for each in (p, q))
    return {
        "made by": "python -m docs.figures.draw losslessness --record",
        "draws": DRAWS, "seed": SEED, "target": exact, "draft": draft, "counts": counts,
    }  # fmt: skip


def draw() -> Figure:
    """Draws one plot per rule from the record."""
    found = json.loads(RECORD.read_text(encoding="utf-8"))
    figure, axes = chart(520, rows=len(RULES), sharex=True)
    for plot, (rule, counts) in zip(axes, found["counts"].items()):
        _plot(plot, rule, counts, found)
    handles, labels = axes[0].get_legend_handles_labels()
    order = [labels.index(label) for label in ("target, exact", "draft, exact", OBSERVED)]
    axes[0].legend([handles[at] for at in order], [labels[at] for at in order], loc="upper right")
    axes[-1].set_xlabel(f"token; {found['draws']:,} draws of each rule")
    return figure


def _plot(axes: Axes, rule: str, counts: list[int], found: dict[str, Any]) -> None:
    target, draft, draws = found["target"], found["draft"], found["draws"]
    order = sorted(range(len(target)), key=lambda token: -target[token])
    x = range(len(order))
    exact = [target[token] for token in order]
    seen = [counts[token] / draws for token in order]
    half = [Z * (value * (1 - value) / draws) ** 0.5 for value in seen]
    axes.bar(x, exact, 0.74, color=BARS[2], label="target, exact")
    axes.plot(x, [draft[token] for token in order], "x", color=ORANGE, markersize=6, label="draft, exact")
    inside = [abs(a - b) <= c for a, b, c in zip(exact, seen, half)]
    axes.errorbar(x, seen, half, fmt="o", markersize=3.5, color=INK, capsize=3, linewidth=1.1, label=OBSERVED)
    axes.set(xticks=list(x), xticklabels=[str(token) for token in order], ylim=(0, None), ylabel="probability")
    axes.grid(axis="y")
    axes.set_title(f"{rule}: {sum(inside)} of {len(inside)} frequencies agree with the target")
