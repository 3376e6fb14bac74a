"""Two steps of the bundled pair: a token tree with a rejection and a recovered token, and one with a bonus token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from docs.figures.draw.shapes import box, elbow, heading, write
from docs.figures.draw.style import BLUE, GREEN, GREY, INK, LINE, MONO, MUTED, ORANGE, SMALL, page

TITLE = "A token tree being verified"
DESCRIPTION = (
    "Two decode steps of demo-target with trees drafted by demo-draft. In the first, the target accepts two draft "
    "tokens, rejects both children of the second, and draws a recovered token. In the second it accepts a whole path "
    "of three tokens and draws a bonus token behind it."
)
RECORD = Path(__file__).resolve().parents[2] / "data" / "token-tree.json"

PROMPT, SEED, TEMPERATURE, RULE, WIDTHS = "Then said the LORD unto", 106, 0.6, "recursive_rejection", (2, 2, 1)
FIRST = 5  # the first of the two steps that are shown

LEFT, COLUMN, ROW, WIDE, HIGH = 12, 91, 32, 72, 23
LOOKS = {"root": INK, "accepted": GREEN, "rejected": GREY, "not tested": LINE, "recovered": ORANGE, "bonus": BLUE}


def record() -> dict[str, Any]:
    """Decodes a text and keeps two of its steps."""
    import torch

    from specdec_fast import SamplingParams, load

    torch.set_num_threads(1)
    options = {"widths": WIDTHS}
    engine = load("demo-target", "demo-draft", drafter="draft_tree", drafter_options=options, rule=RULE)
    rule: Any = engine.rule
    decode = engine.tokenizer.decode
    steps: list[dict[str, Any]] = []

    class Recorder:
        """Passes every call on to the rule of the engine."""

        def __getattr__(self, name: str) -> Any:
            return getattr(rule, name)

        def __call__(self, draft: Any, plan: Any, *others: Any) -> Any:
            acceptance = rule(draft, plan, *others)
            steps.append(
                {
                    "tokens": [decode([token]) for token in draft.tokens.tolist()],
                    "parents": draft.parents.tolist(),
                    "path": acceptance.path[0, : int(acceptance.num_accepted[0]) + 1].tolist(),
                    "next": decode(acceptance.next_token.tolist()),
                }
            )
            return acceptance

    engine.rule = Recorder()
    params = SamplingParams(temperature=TEMPERATURE, seed=SEED, max_new_tokens=32)
    handle = engine.generate([PROMPT], params)[0]
    emitted = sum(len(step["path"]) for step in steps[:FIRST])  # each step emits its accepted tokens and one more
    before = handle.tokens[: emitted - 1]  # without the root of the first step
    return {
        "made by": "python -m docs.figures.draw token-tree --record",
        "target": "demo-target", "draft": "demo-draft", "rule": RULE, "prompt": PROMPT, "temperature": TEMPERATURE,
        "seed": SEED, "before": [decode([token]) for token in before], "steps": steps[FIRST : FIRST + 2],
    }  # fmt: skip


def recorded() -> dict[str, Any]:
    """The record."""
    found: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return found


def verdicts(step: dict[str, Any]) -> list[str]:
    """What became of each node: siblings are tested in their order, below accepted nodes only."""
    path, found = step["path"], []
    for node, parent in enumerate(step["parents"]):
        if node == 0 or node in path:
            found.append("accepted" if node else "root")
        elif parent not in path:
            found.append("not tested")
        else:
            after = path[path.index(parent) + 1 :][:1]
            found.append("not tested" if after and after[0] < node else "rejected")
    return found


def shown(token: str) -> str:
    """A token without its space; ends of lines are made visible."""
    return token.replace("\n", "\u21b5").strip(" ") or "\u2423"


def newest_words(text: str, most: int = 36) -> str:
    """The last whole words of a text, on one line."""
    words = text.replace("\n", " ").split(" ")
    while len(" ".join(words)) > most:
        words = words[1:]
    return f"\u2026 {' '.join(words)} \u2026"


def _node(axes: Axes, x: float, y: float, token: str, verdict: str) -> None:
    plain = verdict in ("rejected", "not tested")
    look: dict[str, Any] = {"fontsize": SMALL if plain else 10.5, "weight": "normal" if plain else "bold"}
    look["color"] = {"root": "white", "not tested": MUTED, "rejected": MUTED}.get(verdict, LOOKS[verdict])
    if verdict == "root":
        look["fill"] = INK
    if verdict == "not tested":
        look["fill"] = "none"
    mark = "\u2717 " if verdict == "rejected" else "\u2713 " if verdict == "accepted" else ""
    box(axes, x, y - HIGH / 2, WIDE, HIGH, mark + shown(token), LOOKS[verdict], dashed=verdict == "not tested", **look)


def _tree(axes: Axes, top: float, step: dict[str, Any]) -> float:
    """Draws one tree; returns the lower edge."""
    parents, path, found = step["parents"], step["path"], verdicts(step)
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents[1:], 1):
        children.setdefault(parent, []).append(node)
    last, new = path[-1], len(parents)
    bonus = last not in children
    children.setdefault(last, []).append(new)
    places: dict[int, tuple[float, float]] = {}
    lines = iter(range(len(parents)))

    def place(node: int, depth: int) -> float:
        ys = [place(child, depth + 1) for child in children.get(node, ())]
        y = (ys[0] + ys[-1]) / 2 if ys else top + (next(lines) + 0.5) * ROW
        places[node] = (LEFT + depth * COLUMN, y)
        return y

    place(0, 0)
    verdict = [*found, "bonus" if bonus else "recovered"]
    on_path = [*path, new]
    for node, (x, y) in places.items():
        if node:
            parent = [*parents, last][node]
            chosen = node in on_path
            look = {"color": LOOKS[verdict[node]], "linewidth": 2.4, "zorder": 3} if chosen else {}
            elbow(axes, (places[parent][0] + WIDE, places[parent][1]), (x, y), **look)
    for node, (x, y) in places.items():
        _node(axes, x, y, [*step["tokens"], step["next"]][node], verdict[node])
    return max(y for _, y in places.values()) + ROW / 2


def draw() -> Figure:
    """Draws both steps from the record."""
    found = recorded()
    figure, axes = page(568)
    text = found["prompt"] + "".join(found["before"])
    y = 18.0
    for number, step in enumerate(found["steps"], 1):
        count = len(step["path"])
        bonus = step["path"][-1] not in step["parents"]
        what = "a whole path is accepted" if bonus else "a path ends with rejections"
        heading(axes, y, f"Step {number}: {what}")
        write(axes, 12, y + 21, newest_words(text), family=MONO, fontsize=SMALL, color=MUTED)
        y = _tree(axes, y + 36, step)
        kind = "bonus" if bonus else "recovered"
        new = "".join(step["tokens"][node] for node in step["path"][1:]) + step["next"]
        write(axes, 12, y + 12, f"{count} tokens from one target pass: {count - 1} accepted, 1 {kind}", weight="bold")
        text += step["tokens"][0] + new.removesuffix(step["next"])
        y += 50
    _legend(axes, y)
    return figure


def _legend(axes: Axes, y: float) -> None:
    words = {
        "root": "newest committed token", "accepted": "accepted draft token", "recovered": "drawn after rejections",
        "bonus": "drawn after a whole path", "rejected": "tested and rejected", "not tested": "its turn did not come",
    }  # fmt: skip
    for at, (name, meaning) in enumerate(words.items()):
        x, line = 12 + at % 2 * 226, y + at // 2 * 30
        _node(axes, x, line, name, name)
        write(axes, x + WIDE + 8, line, meaning, fontsize=SMALL)
