"""Multi-token prediction: the module that was trained with the target drafts a chain or a tree by repeated application.

The module is in specdec_fast/heads/mtp.py. Tests: tests/drafters/test_mtp.py and the contract suite.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specdec_fast.draft_runners.head_runner import PagedHead
from specdec_fast.draft_runners.head_trees import HeadTrees
from specdec_fast.heads.checkpoint_mtp import load_mtp
from specdec_fast.interfaces import DrafterParts, Needs
from specdec_fast.trees.static_shape import shape_of_widths


class MtpDrafter(HeadTrees):
    """Drafts with the multi-token prediction module of a checkpoint.

    Args:
        target: The target to draft for.
        head: Folder or hub id of a checkpoint with such a module, or a loaded head. None: the target's own checkpoint.
        num_draft_tokens: Default budget per row. None: 3, or 24 with `depth`, or all nodes of `shape`.
        how: How siblings are picked: one of `specdec_fast.trees.sibling_picking.HOWS`, or a rule's `prefers`.
        depth: Levels of a dynamic tree. 0: the static tree `shape`.
        width: Nodes that grow per level of a dynamic tree, and children considered for each of them.
        shape: Static tree: a list of parents, or a file of `specdec tune tree`. None: a chain.
        own_tables: Whether the head drafts with an embedding and a projection of its own where its checkpoint has some
            that differ from the target's. False helps if these were never trained.

    Raises:
        ValueError: If the head cannot be loaded or belongs to another target, or if the target has latent attention or
            recurrent layers.

    Source:
        DeepSeek-AI 2024 (DeepSeek-V3), section 2.2.
    """

    name = "mtp"
    needs = Needs(topology="chain", own_cache=True, aux_hidden_states=("final_norm",))

    def __init__(
        self,
        target: Any,
        head: str | Path | Any | None = None,
        num_draft_tokens: int | None = None,
        how: str = "coupled",
        depth: int = 0,
        width: int = 8,
        shape: str | Path | Sequence[int] | None = None,
        own_tables: bool = True,
    ) -> None:
        if head is None:
            head = getattr(target, "model_id", "")
            if not head:
                raise ValueError("mtp head: got none; expected -o head=FOLDER (or a hub id), the target's checkpoint")
        if isinstance(head, (str, Path)):
            head = PagedHead(load_mtp(head, target, own_tables), target)
        if shape is None and not depth:
            shape = shape_of_widths((1,) * (3 if num_draft_tokens is None else max(num_draft_tokens, 1))).parents
        super().__init__(head, how=how, num_draft_tokens=num_draft_tokens, depth=depth, width=width, shape=shape)

    @staticmethod
    def by_rule(prefers: str) -> dict[str, Any]:
        """Returns the defaults of options that follow from the rule."""
        return {"how": prefers}

    @classmethod
    def from_parts(cls, parts: DrafterParts, **options: Any) -> MtpDrafter:
        """Builds a drafter for `parts.target` that picks tokens as the rule prefers."""
        return cls(parts.target, **{**cls.by_rule(parts.prefers), **options})


DRAFTER = MtpDrafter
