"""One decode step from top to bottom, with the modules that do it and the data between them."""

from __future__ import annotations

from dataclasses import dataclass

from matplotlib.figure import Figure

from docs.figures.draw.imports import home
from docs.figures.draw.shapes import arrow, box, heading, write
from docs.figures.draw.style import BLUE, GREEN, INK, MONO, MUTED, ORANGE, PURPLE, SMALL, page

TITLE = "One decode step"
DESCRIPTION = (
    "Engine.step makes room and admits requests, then proposes drafts, plans their trees, scores all nodes in one "
    "target pass, verifies them, commits keys and values, appends tokens and lets the drafter observe. Between them "
    "pass Draft, TreePlan, TargetOutput, TokenDistributions and Acceptance."
)

TOP, ROW, LEFT, WIDE, HIGH = 54.0, 57.0, 32.0, 92.0, 26.0


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of the step. where: the class or function that does it; data: what it returns."""

    verb: str
    does: str
    where: str
    data: str = ""
    fields: str = ""
    colour: str = BLUE


STAGES = (
    Stage("admit", "reserves cache pages, prefills new prompts in chunks", "prefill", colour=MUTED),
    Stage("propose", "the drafter drafts a token tree per request", "DrafterRunner",
          "Draft", "tokens, parents, offsets, distributions", PURPLE),
    Stage("plan", "links the nodes of the packed trees", "tree_plan", "TreePlan", "depths, ancestor bits, links"),
    Stage("score", "runs the target once over all nodes", "HuggingFaceTarget", "TargetOutput",
          "logits of every node"),
    Stage("process", "applies processors, temperature and filters", "target_distributions",
          "TokenDistributions", "one per node"),
    Stage("verify", "the rule walks the trees", "rule_for", "Acceptance", "path, count, next token", GREEN),
    Stage("commit", "keeps accepted keys and values", "PagedCache"),
    Stage("append", "appends tokens, checks stop conditions", "DecodeState", "tokens",
          "the newest is the next root", ORANGE),
    Stage("observe", "the drafter learns from the acceptance", "DrafterRunner", colour=PURPLE),
)  # fmt: skip


def draw() -> Figure:
    """Draws the stages, with the modules that define them today."""
    figure, axes = page(TOP + ROW * len(STAGES) - 8)
    heading(axes, 18, "One decode step", f"Engine.step, {home('Engine')}.py")
    for at, stage in enumerate(STAGES):
        y = TOP + at * ROW
        box(axes, LEFT, y, WIDE, HIGH, stage.verb, stage.colour, weight="bold")
        write(axes, LEFT + WIDE + 12, y + 6, stage.does)
        write(axes, LEFT + WIDE + 12, y + 22, home(stage.where), family=MONO, fontsize=SMALL - 0.5, color=MUTED)
        if at + 1 < len(STAGES):
            x = LEFT + WIDE / 2
            arrow(axes, (x, y + HIGH), (x, y + ROW))
            if stage.data:
                write(axes, x + 12, y + HIGH + 16, stage.data, family=MONO, fontsize=SMALL, weight="bold", color=INK)
                offset = 6.2 * len(stage.data) + 22
                write(axes, x + offset, y + HIGH + 16, stage.fields, fontsize=SMALL, color=MUTED)
    x, first, last = 16.0, TOP + HIGH / 2, TOP + (len(STAGES) - 1) * ROW + HIGH / 2
    axes.plot((LEFT, x, x), (last, last, first), color=INK, linewidth=1.2)
    arrow(axes, (x, first), (LEFT, first))
    return figure
