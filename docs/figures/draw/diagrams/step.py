"""One decode step from top to bottom: its phases, the modules that run them, and the data between them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from matplotlib.figure import Figure

from docs.figures.draw.imports import home
from docs.figures.draw.shapes import arrow, box, heading, write
from docs.figures.draw.style import BLUE, GREEN, INK, MONO, MUTED, ORANGE, PURPLE, SMALL, page

TITLE = "One decode step"
DESCRIPTION = (
    "Before a step, requests reserve cache pages and new prompts are prefilled. Seven phases follow: propose drafts, "
    "plan their trees, score all nodes in one target pass, verify them, commit keys and values, append tokens up to a "
    "stop condition, and let the drafter observe. Between them pass Draft, TreePlan, TargetOutput and Acceptance, and "
    "inside of verify TokenDistributions."
)

TOP, PART, GAP, LEFT, WIDE, HIGH = 54.0, 34.0, 23.0, 32.0, 92.0, 26.0


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase of the step.

    Attributes:
        verb: Its name.
        parts: Descriptions, each with the class or function that does the work.
        data: The type that it passes on.
        fields: The content of that type.
        colour: The colour of its box.
    """

    verb: str
    parts: tuple[tuple[str, str], ...]
    data: str = ""
    fields: str = ""
    colour: str = BLUE

    @property
    def height(self) -> float:
        """The height of the phase, with the arrow below it."""
        return PART * len(self.parts) + GAP


PREPARATION = Phase(
    "reserve, admit",
    (
        ("running requests reserve cache pages", "Scheduler"),
        ("new prompts are prefilled, one slice per step", "Prefill"),
    ),
    colour=MUTED,
)
PHASES = (
    Phase("propose", (("the drafter drafts a token tree per request", "DrafterRunner"),),
          "Draft", "tokens, parents, offsets, distributions", PURPLE),
    Phase("plan", (("links the nodes of the packed trees", "tree_plan"),), "TreePlan", "depths, ancestor bits, links"),
    Phase("score", (("runs the target once over all nodes", "HuggingFaceTarget"),),
          "TargetOutput", "logits of every node"),
    Phase("verify", (("applies processors, temperature and filters", "target_distributions"),
                     ("the rule accepts a path of each tree", "rule_for")),
          "Acceptance", "path, count, next token", GREEN),
    Phase("commit", (("keeps accepted keys and values", "PagedCache"),)),
    Phase("append", (("cuts the tokens at a stop condition", "StopChecker"),
                     ("stores them; the last one is the next root", "DecodeState")), colour=ORANGE),
    Phase("observe", (("the drafter learns from the acceptance", "DrafterRunner"),), colour=PURPLE),
)  # fmt: skip


def draw() -> Figure:
    """Draws the phases, with the modules that define them today."""
    shown = (PREPARATION, *PHASES)
    tops = list(accumulate((phase.height for phase in shown), initial=TOP))
    figure, axes = page(tops[-1] - 8)
    heading(axes, 18, "One decode step", f"Engine.step, {home('Engine')}.py")
    for number, (y, below, phase) in enumerate(zip(tops, tops[1:], shown)):
        look = {"dashed": True, "fontsize": SMALL} if phase is PREPARATION else {"weight": "bold"}
        box(axes, LEFT, y, WIDE, HIGH, f"{number}. {phase.verb}" if number else phase.verb, phase.colour, **look)
        for at, (words, name) in enumerate(phase.parts):
            write(axes, LEFT + WIDE + 12, y + 6 + at * PART, words)
            module = {"family": MONO, "fontsize": SMALL - 0.5, "color": MUTED}
            write(axes, LEFT + WIDE + 12, y + 22 + at * PART, home(name), **module)
        x = LEFT + WIDE / 2
        if phase is not shown[-1]:
            arrow(axes, (x, y + HIGH), (x, below))
        if phase.data:
            write(axes, x + 12, below - 15, phase.data, family=MONO, fontsize=SMALL, weight="bold", color=INK)
            write(axes, x + 6.2 * len(phase.data) + 34, below - 15, phase.fields, fontsize=SMALL, color=MUTED)
    x, first, last = 16.0, TOP + HIGH / 2, tops[-2] + HIGH / 2
    axes.plot((LEFT, x, x), (last, last, first), color=INK, linewidth=1.2)
    arrow(axes, (x, first), (LEFT, first))
    return figure
