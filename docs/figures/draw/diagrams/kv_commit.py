"""The slots of one request in the paged cache before and after a commit, read back from a real `PagedCache`."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from docs.figures.draw.diagrams.token_tree import recorded, shown
from docs.figures.draw.shapes import box, heading, write
from docs.figures.draw.style import BLUE, GREEN, GREY, LINE, MONO, MUTED, SMALL, page

TITLE = "The paged cache before and after a commit"
DESCRIPTION = (
    "Four pages of a request. Before the commit, committed tokens are followed by all staged nodes of the tree. After "
    "it, the accepted nodes have moved to the front, and the length says that the other slots are free."
)

PAGE, PAGES = 4, 4
WIDE, HIGH, GAP, ROW = 100.0, 24.0, 9.0, 29.0
TOP = 76.0


def slots() -> dict[str, Any]:
    """Stages the second tree of `token-tree.svg` behind five tokens and commits its path.

    Returns:
        The words of each slot before and after, the lengths of both, and the pages in their order.
    """
    import torch

    from specdec_fast.cache.paged import PagedCache
    from specdec_fast.cache.shapes import LayerShape
    from specdec_fast.core.draft import Draft

    found = recorded()
    first, step = found["steps"]
    text = [*found["before"], *(first["tokens"][node] for node in first["path"])]
    prefix = [shown(token) for token in text[-5:]]
    nodes = [shown(token) for token in step["tokens"]]
    words = ["", *prefix, *nodes]  # keys are indices into this list

    shape = LayerShape(num_kv_heads=1, key_dim=1, value_dim=1)
    cache = PagedCache([shape], num_pages=8, page_size=PAGE, max_rows=2, max_length=PAGE * PAGES, dtype=torch.float32)
    cache.reserve(1, PAGE)  # another request holds the first page
    cache.reserve(0, PAGE * PAGES)
    row = torch.tensor([0], dtype=torch.int32)

    def stage(keys: list[int], draft: Draft | None) -> Any:
        offsets = torch.tensor([0, len(keys)], dtype=torch.int32)
        plan = None if draft is None else draft.get_plan()
        found = cache.stage(row, offsets, len(keys), plan, advance=draft is None)
        cache.keys[0].view(-1)[found.slots] = torch.tensor(keys, dtype=torch.float32)
        return found

    def read() -> list[str]:
        pages = cache.page_table[0].tolist()
        return [words[int(key)] for page in pages for key in cache.keys[0][page].flatten().tolist()]

    stage(list(range(1, 6)), None)
    draft = Draft.trees([0], [(list(range(len(nodes))), step["parents"])])
    staged = stage(list(range(6, 6 + len(nodes))), draft)
    before, length = read(), int(cache.lengths[0])
    path = torch.tensor([step["path"]], dtype=torch.int32)
    cache.commit(row, staged, path, torch.tensor([len(step["path"]) - 1], dtype=torch.int32))
    return {
        "before": before, "after": read(), "length": length, "new length": int(cache.lengths[0]),
        "pages": cache.page_table[0].tolist(), "path": step["path"], "nodes": len(nodes),
    }  # fmt: skip


def draw() -> Figure:
    """Draws both states."""
    found = slots()
    figure, axes = page(446)
    length, after, end = found["length"], found["new length"], found["length"] + found["nodes"]
    kept = {length + node for node in found["path"]}
    heading(axes, 18, "Before the commit", f"length {length}: committed tokens, then {found['nodes']} staged nodes")
    kinds = [BLUE if at < length else GREEN if at in kept else GREY if at < end else LINE for at in range(PAGE * PAGES)]
    _pages(axes, TOP, found["before"], kinds, found["pages"])
    low = TOP + PAGE * ROW + 78
    heading(axes, low - 58, "After the commit", f"length {after}: the path has moved to the front in all layers")
    kinds = [BLUE if at < length else GREEN if at < after else LINE for at in range(PAGE * PAGES)]
    _pages(axes, low, found["after"], kinds, found["pages"])
    y = low + PAGE * ROW + 16
    legend = ((BLUE, "committed"), (GREEN, "root and accepted"), (GREY, "not accepted"), (LINE, "free"))
    for (colour, text), x in zip(legend, (12, 116, 266, 386)):
        look: dict[str, Any] = {"fill": "white", "dashed": True} if colour == LINE else {}
        box(axes, x, y - 8, 16, 16, colour=colour, **look)
        write(axes, x + 22, y, text, fontsize=SMALL)
    words = "Free slots keep their old contents until the next step stages nodes there."
    write(axes, 12, y + 26, words, fontsize=SMALL, color=MUTED)
    return figure


def _pages(axes: Axes, top: float, words: list[str], kinds: list[str], pages: list[int]) -> None:
    """Draws pages as columns of slots, with the position and the token of each."""
    for column, number in enumerate(pages):
        x = 14 + column * (WIDE + GAP)
        write(axes, x + WIDE / 2, top - 12, f"page {number}", ha="center", fontsize=SMALL, color=MUTED)
        for line in range(PAGE):
            at, y = column * PAGE + line, top + line * ROW
            look: dict[str, Any] = {"fill": "white", "color": MUTED, "dashed": True} if kinds[at] == LINE else {}
            box(axes, x, y, WIDE, HIGH, f"{at:2} {words[at]}", kinds[at], fontsize=SMALL, family=MONO, **look)
