"""The time of one small call of each operator: the C++ kernel, Python around it, and a Triton launch."""

from __future__ import annotations

from matplotlib.figure import Figure

from docs.figures.draw.bars import Bar, Group, Scale, draw_bars, height, legend
from docs.figures.draw.results import newest, source
from docs.figures.draw.shapes import heading, write
from docs.figures.draw.style import BARS, MUTED, SMALL, page

RESULT = "call_cost_cpu.json"
TITLE = "The cost of a call, by operator"
DESCRIPTION = (
    "Microseconds of a call of each operator with small tensors: the C++ kernel, Python around it, and, in another "
    "bar, what Python takes for the launch of the Triton kernel."
)


def draw() -> Figure:
    """Draws one or two bars per operator, the dearest call first."""
    machine = newest(RESULT)
    calls = {row["name"]: row for row in machine["rows"] if row["benchmark"] == "python_around_a_kernel"}
    launches = {row["name"]: row["launch_us"] for row in machine["rows"] if row["benchmark"] == "python_of_a_launch"}
    groups = []
    for name in sorted(calls, key=lambda name: -calls[name]["call_us"]):
        row = calls[name]
        bars = [Bar(name, row["kernel_us"], BARS[0], rest=row["python_us"])]
        if name in launches:
            bars.append(Bar("", launches[name], BARS[1]))
        groups.append(Group("", bars))
    scale = Scale(50, (0, 10, 20, 30, 40), "\u00b5s", 176, "{:.1f}", row=14.5, gap=5)
    figure, axes = page(height(groups, scale) + 110)
    heading(axes, 18, "One call of each operator", "small tensors, where the call itself is most of the time")
    legend(axes, 56, ((BARS[0], "C++ kernel; open: Python around it"), (BARS[1], "Python of a Triton launch")))
    bottom = draw_bars(axes, 74, groups, scale)
    write(axes, 12, bottom + 18, source(RESULT, machine["environment"]), fontsize=SMALL, color=MUTED)
    return figure
