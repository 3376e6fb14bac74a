"""EAGLE-1 and EAGLE-2: a head predicts the target's next hidden states and drafts a tree level by level.

EAGLE-2 grows a dynamic tree and is the default. `depth=0` is EAGLE-1: a static tree, whose siblings are sampled without
replacement if the rule uses distributions. The head is in specdec_fast/heads/eagle.py.
Tests: tests/drafters/test_eagle.py and the contract suite.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specdec_fast.draft_runners.head_runner import PagedHead
from specdec_fast.draft_runners.head_trees import HeadTrees
from specdec_fast.heads.checkpoint import bundled_head
from specdec_fast.heads.checkpoint_eagle import load_eagle
from specdec_fast.interfaces import DrafterParts, Needs


class EagleDrafter(HeadTrees):
    """Drafts trees with an EAGLE head.

    Keys and values of the head come from the target's true hidden states wherever these are known.

    Args:
        target: The target to draft for.
        head: Folder or hub id of a checkpoint, or a loaded head. None: the head bundled for the target.
        num_draft_tokens: Default budget per row. None: 24, or all nodes of the static tree.
        how: How siblings are picked: one of `specdec_fast.trees.sibling_picking.HOWS`, or a rule's `prefers`.
        depth: Levels of a dynamic tree. 0: the static tree `shape` (EAGLE-1).
        width: Nodes that grow per level of a dynamic tree, and children considered for each of them.
        shape: Static tree: a list of parents, or a file of `specdec tune tree`. None: the published tree.
        own_tables: Whether the head drafts with an embedding and a projection of its own where its checkpoint has some
            that differ from the target's. False helps if these were never trained.

    Raises:
        ValueError: If the head cannot be loaded or belongs to another target, or if an option is out of range.

    Source:
        Li et al. 2024a (EAGLE), section 4.2; Li et al. 2024b (EAGLE-2), section 4.
    """

    name = "eagle"
    needs = Needs(topology="tree", own_cache=True, aux_hidden_states=("final_norm",))

    def __init__(
        self,
        target: Any,
        head: str | Path | Any | None = None,
        num_draft_tokens: int | None = None,
        how: str = "coupled",
        depth: int = 5,
        width: int = 8,
        shape: str | Path | Sequence[int] | None = None,
        own_tables: bool = True,
    ) -> None:
        if head is None:
            head = bundled_head(target, self.name)
        if isinstance(head, (str, Path)):
            head = PagedHead(load_eagle(head, target, own_tables), target)
        super().__init__(head, how=how, num_draft_tokens=num_draft_tokens, depth=depth, width=width, shape=shape)

    @staticmethod
    def by_rule(prefers: str) -> dict[str, Any]:
        """Returns the defaults of options that follow from the rule."""
        return {"how": prefers}

    @classmethod
    def from_parts(cls, parts: DrafterParts, **options: Any) -> EagleDrafter:
        """Builds a drafter for `parts.target` that picks tokens as the rule prefers."""
        return cls(parts.target, **{**cls.by_rule(parts.prefers), **options})


DRAFTER = EagleDrafter
