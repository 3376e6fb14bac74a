"""EAGLE-1 and EAGLE-2: a head that predicts the target's next hidden state drafts a tree, level by level.

EAGLE-2 (Li et al. 2024b, section 4) grows a dynamic tree and is the default; `depth=0` is EAGLE-1 (Li et al. 2024a,
section 4.2): a static tree, its siblings drawn without replacement where the rule uses distributions. The head:
specdec_fast/heads/eagle.py. Tests: tests/drafters/test_eagle.py and the contract suite.
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
    """Drafts for `target` with `head`: a folder or hub id of a checkpoint, or a head that is open already
    (default: the one that is bundled for the target).

    depth: levels of a dynamic tree, 0 for the static tree `shape` (a list of parents, a file of `specdec tune tree`;
    default: the published one); width: nodes that are grown per level, and children looked at of each;
    num_draft_tokens: the default budget per row (default: 24, or the static tree); how: one of `growing.HOWS`, or a
    rule's `prefers`. The head's keys and values come from true hidden states wherever these are known.
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
    ) -> None:
        if head is None:
            head = bundled_head(target, self.name)
        if isinstance(head, (str, Path)):
            head = PagedHead(load_eagle(head, target), target)
        super().__init__(head, how=how, num_draft_tokens=num_draft_tokens, depth=depth, width=width, shape=shape)

    @staticmethod
    def by_rule(prefers: str) -> dict[str, Any]:
        """Defaults where it is made for a rule."""
        return {"how": prefers}

    @classmethod
    def from_parts(cls, parts: DrafterParts, **options: Any) -> EagleDrafter:
        """Over the target that is drafted for, picking tokens as the rule prefers."""
        return cls(parts.target, **{**cls.by_rule(parts.prefers), **options})


DRAFTER = EagleDrafter
