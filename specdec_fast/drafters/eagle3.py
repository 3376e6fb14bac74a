"""EAGLE-3: a head that reads three hidden states of the target drafts a dynamic tree, level by level.

Li et al. 2025; the tree is that of EAGLE-2. Draft tokens come from the head's own vocabulary. The head:
specdec_fast/heads/eagle3.py. Tests: tests/drafters/test_eagle.py and the contract suite.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specdec_fast.draft_runners.head_input_layers import choose_layers
from specdec_fast.draft_runners.head_runner import PagedHead
from specdec_fast.draft_runners.head_trees import HeadTrees
from specdec_fast.heads.checkpoint import ASSETS, bundled_head
from specdec_fast.heads.checkpoint_eagle import load_eagle3
from specdec_fast.interfaces import DrafterParts, Needs

log = logging.getLogger("specdec_fast")


class Eagle3Drafter(HeadTrees):
    """Drafts for `target` with `head`: a folder or hub id of a checkpoint, or a head that is open already
    (default: the one that is bundled for the target).

    layers: in place of what the checkpoint says, the layers of the target whose inputs the head reads, or "auto":
    those told, one before or one behind, whichever is accepted most on `text` (token ids; `from_parts` takes words
    too, and has some of its own);
    depth: levels of a dynamic tree, 0 for the static tree `shape` (a list of parents, a file of `specdec tune tree`;
    default: the published one); width: nodes that are grown per level, and children looked at of each;
    num_draft_tokens: the default budget per row (default: 24, or the static tree); how: one of `growing.HOWS`, or a
    rule's `prefers`. The head's keys and values come from true hidden states wherever these are known.
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
    ) -> None:
        if isinstance(layers, str) and (layers != "auto" or text is None or isinstance(text, str)):
            raise ValueError(
                f"eagle3 layers: got {layers!r} and text {text!r:.40}; expected numbers, or 'auto' and a text to tell "
                "by, as token ids"
            )
        if head is None:
            head = bundled_head(target, self.name)
        if isinstance(head, (str, Path)):
            told = None if isinstance(layers, str) else layers
            head = PagedHead(load_eagle3(head, target, layers=told), target)
        if layers == "auto":
            rates = choose_layers(head, target, text)
            log.info("eagle3 reads %s; acceptance by layers: %s", ", ".join(head.aux_hidden_states), rates)
        super().__init__(head, how=how, num_draft_tokens=num_draft_tokens, depth=depth, width=width, shape=shape)

    @staticmethod
    def by_rule(prefers: str) -> dict[str, Any]:
        """Defaults where it is made for a rule."""
        return {"how": prefers}

    @classmethod
    def from_parts(cls, parts: DrafterParts, **options: Any) -> Eagle3Drafter:
        """Over the target that is drafted for, picking tokens as the rule prefers."""
        text = options.get("text")
        if options.get("layers") == "auto" and parts.tokenizer is not None and (text is None or isinstance(text, str)):
            words = text or (ASSETS / "heldout.txt").read_text(encoding="utf-8")[:4000]
            options["text"] = parts.tokenizer.encode(words)
        return cls(parts.target, **{**cls.by_rule(parts.prefers), **options})


DRAFTER = Eagle3Drafter
