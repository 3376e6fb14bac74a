"""Multi-token prediction: the module that came with the target drafts a chain, or a tree, by being applied again.

DeepSeek-AI 2024 (DeepSeek-V3), section 2.2. The module: specdec_fast/heads/mtp.py. Tests: tests/drafters/test_mtp.py
and the contract suite.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specdec_fast.draft_runners.head_runner import PagedHead
from specdec_fast.draft_runners.head_trees import HeadTrees
from specdec_fast.heads.checkpoint_mtp import load_mtp
from specdec_fast.interfaces import DrafterParts, Needs
from specdec_fast.trees.topology import shape_of_widths


class MtpDrafter(HeadTrees):
    """Drafts for `target` with `head`: a folder or hub id of a checkpoint with such modules, or a head that is open
    already (default: the checkpoint that the target came from).

    num_draft_tokens: nodes per row (default: 3, a static tree's or 24 of a dynamic one); depth, width: levels of a
    dynamic tree and nodes grown on each, 0 for a static `shape` (a list of parents, a file of `specdec tune tree`;
    default: a chain); how: one of `growing.HOWS`, or a rule's `prefers`.

    Raises ValueError for heads that cannot be loaded or belong to another target, and for targets with latent attention
    or recurrent layers.
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
    ) -> None:
        if head is None:
            head = getattr(target, "model_id", "")
            if not head:
                raise ValueError("mtp head: got none; expected -o head=FOLDER (or a hub id), the target's checkpoint")
        if isinstance(head, (str, Path)):
            head = PagedHead(load_mtp(head, target), target)
        if shape is None and not depth:
            shape = shape_of_widths((1,) * (3 if num_draft_tokens is None else max(num_draft_tokens, 1))).parents
        super().__init__(head, how=how, num_draft_tokens=num_draft_tokens, depth=depth, width=width, shape=shape)

    @staticmethod
    def by_rule(prefers: str) -> dict[str, Any]:
        """Defaults where it is made for a rule."""
        return {"how": prefers}

    @classmethod
    def from_parts(cls, parts: DrafterParts, **options: Any) -> MtpDrafter:
        """Over the target that is drafted for, picking tokens as the rule prefers."""
        return cls(parts.target, **{**cls.by_rule(parts.prefers), **options})


DRAFTER = MtpDrafter
