"""The time of one forward pass as modules, compiled, and as the operator `fused_forward`."""

from __future__ import annotations

from matplotlib.figure import Figure

from docs.figures.draw.bars import Bar, Group, Scale, draw_bars, height
from docs.figures.draw.results import newest, source
from docs.figures.draw.shapes import heading, write
from docs.figures.draw.style import BARS, MUTED, SMALL, page

RESULT = "decoder_cpu.json"
TITLE = "Forward passes as modules, compiled and fused"
DESCRIPTION = (
    "Microseconds of one forward pass of demo-draft and demo-target on two threads, run as modules, under "
    "torch.compile and as one operator, for one request and for eight."
)
KINDS = (("modules", "modules", BARS[3]), ("compiled", "torch.compile", BARS[2]), ("whole", "fused_forward", BARS[0]))


def draw() -> Figure:
    """Draws one group per model and size of the pass."""
    machine = newest(RESULT)
    rows = [row for row in machine["rows"] if "modules_warm_us" in row and row["threads"] == 2]
    groups = []
    for row in rows:
        requests = f"{row['rows']} requests" if row["rows"] > 1 else "1 request"
        nodes = f"{row['nodes']} nodes" if row["nodes"] > 1 else "1 node"
        bars = [Bar(label, row[f"{kind}_warm_us"] / 1000, colour) for kind, label, colour in KINDS]
        groups.append(Group(f"{row['name']}: {requests}, {nodes}{' each' if row['rows'] > 1 else ''}", bars))
    most = max(bar.value for group in groups for bar in group.bars)
    scale = Scale(most * 1.12, [tick for tick in range(20) if tick <= most], "ms", 132, "{:.2f}", gap=10)
    figure, axes = page(height(groups, scale) + 88)
    heading(axes, 18, "One forward pass", "milliseconds, float32, two threads, weights in warm caches")
    bottom = draw_bars(axes, 52, groups, scale)
    write(axes, 12, bottom + 18, source(RESULT, machine["environment"]), fontsize=SMALL, color=MUTED)
    return figure
