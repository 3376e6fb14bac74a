"""EAGLE-3: a head reads hidden states of the target, usually three, and drafts a dynamic tree level by level.

The tree is the one of EAGLE-2. Draft tokens come from the head's own vocabulary. The head is in
specdec_fast/heads/eagle3.py. Tests: tests/drafters/test_eagle.py and the contract suite.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specdec_fast.draft_runners.detect_aux_layers import choose_layers
from specdec_fast.draft_runners.head_runner import PagedHead
from specdec_fast.draft_runners.head_trees import HeadTrees
from specdec_fast.heads.checkpoint import ASSETS, bundled_head
from specdec_fast.heads.checkpoint_eagle import load_eagle3
from specdec_fast.interfaces import DrafterParts, Needs

log = logging.getLogger("specdec_fast")


class Eagle3Drafter(HeadTrees):
    """Drafts trees with an EAGLE-3 head.

    Keys and values of the head come from the target's true hidden states wherever these are known.

    Args:
        target: The target to draft for.
        head: Folder or hub id of a checkpoint, or a loaded head. None: the head bundled for the target.
        num_draft_tokens: Default budget per row. None: 24, or all nodes of the static tree.
        how: How siblings are picked: one of `specdec_fast.trees.sibling_picking.HOWS`, or a rule's `prefers`.
        depth: Levels of a dynamic tree. 0: the static tree `shape`.
        width: Nodes that grow per level of a dynamic tree, and children considered for each of them.
        shape: Static tree: a list of parents, or a file of `specdec tune tree`. None: the published tree.
        layers: Layers of the target whose inputs the head reads, in place of those that the checkpoint names. "auto"
            tries these, one layer earlier and one later, and keeps those with the best acceptance on `text`.
        text: Text for `layers="auto"`, as token ids. `from_parts` also accepts a string, and has a default.
        own_tables: Whether the head drafts with an embedding and a projection of its own where its checkpoint has some
            that differ from the target's. False helps if these were never trained.

    Raises:
        ValueError: If the head cannot be loaded or belongs to another target, or if an option is out of range.

    Source:
        Li et al. 2025 (EAGLE-3).
    """

    name = "eagle3"
    needs = Needs(topology="tree", own_cache=True)

    def __init__(
        self,
        target: Any,
        head: str | Path | Any | None = None,
        num_draft_tokens: int | None = None,
        how: str = "coupled",
        depth: int = 5,
        width: int = 8,
        shape: str | Path | Sequence[int] | None = None,
        layers: Sequence[int] | str | None = None,
        text: Any = None,
        own_tables: bool = True,
    ) -> None:
        if isinstance(layers, str) and (layers != "auto" or text is None or isinstance(text, str)):
            raise ValueError(
                f"eagle3 layers: got {layers!r} and text {text!r:.40}; expected numbers, or 'auto' and a text to "
                "measure on, as token ids"
            )
        if head is None:
            head = bundled_head(target, self.name)
        if isinstance(head, (str, Path)):
            listed = None if isinstance(layers, str) else layers
            head = PagedHead(load_eagle3(head, target, listed, own_tables), target)
        if layers == "auto":
            rates = choose_layers(head, target, text)
            log.info("eagle3 reads %s; acceptance by layers: %s", ", ".join(head.aux_hidden_states), rates)
        super().__init__(head, how=how, num_draft_tokens=num_draft_tokens, depth=depth, width=width, shape=shape)

    @staticmethod
    def by_rule(prefers: str) -> dict[str, Any]:
        """Returns the defaults of options that follow from the rule."""
        return {"how": prefers}

    @classmethod
    def from_parts(cls, parts: DrafterParts, **options: Any) -> Eagle3Drafter:
        """Builds a drafter for `parts.target` that picks tokens as the rule prefers."""
        text = options.get("text")
        if options.get("layers") == "auto" and parts.tokenizer is not None and (text is None or isinstance(text, str)):
            words = text or (ASSETS / "heldout.txt").read_text(encoding="utf-8")[:4000]
            options["text"] = parts.tokenizer.encode(words)
        return cls(parts.target, **{**cls.by_rule(parts.prefers), **options})


DRAFTER = Eagle3Drafter
