"""Blockwise parallel decoding: one head per position drafts a chain (Stern et al. 2018).

Scoring and proposing share one pass, as in section 5 of the paper: the pass that verifies a draft yields the hidden
state for the next one. The target itself is the paper's first head, so the text is the target's, and every rule may
verify. The paper's approximate acceptance is rule `lossy:among=k`. Tests: tests/drafters/test_blockwise.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specdec_fast.draft_runners.parallel_heads import AUX_HIDDEN_STATE, ParallelHeadsDrafter
from specdec_fast.heads.blockwise import BlockwiseHeads
from specdec_fast.heads.checkpoint import bundled_head
from specdec_fast.heads.checkpoint_blockwise import load_blockwise
from specdec_fast.interfaces import DrafterParts, Needs
from specdec_fast.trees.static_shape import shape_of_widths


class BlockwiseDrafter(ParallelHeadsDrafter):
    """Drafts a chain of the best token of each head.

    Args:
        target: The target to draft for.
        head: Folder or hub id of the heads, or loaded heads. None: the heads bundled for the target.
        num_draft_tokens: Length of the chain. None: all heads.
        pick: "coupled" picks tokens with the noise of rule `replay`, "greedy" by the logits alone.

    Raises:
        ValueError: If the heads cannot be loaded or belong to another target, or if an option is out of range.

    Source:
        Stern et al. 2018, sections 3 and 5.
    """

    name = "blockwise"
    needs = Needs(topology="chain", aux_hidden_states=(AUX_HIDDEN_STATE,))

    def __init__(
        self,
        target: Any,
        head: str | Path | BlockwiseHeads | None = None,
        num_draft_tokens: int | None = None,
        pick: str = "coupled",
    ) -> None:
        if not isinstance(head, BlockwiseHeads):
            place = bundled_head(target, self.name) if head is None else head
            head = load_blockwise(place, hidden_size=target.hidden_size, vocab_size=target.num_embeddings)
            head = head.to(device=target.device, dtype=target.dtype)
        super().__init__(target, head, shape_of_widths((1,) * head.num_heads), num_draft_tokens, pick)

    @staticmethod
    def by_rule(prefers: str) -> dict[str, Any]:
        """Returns the defaults of options that follow from the rule."""
        return {"pick": "coupled" if prefers == "coupled" else "greedy"}

    @classmethod
    def from_parts(cls, parts: DrafterParts, **options: Any) -> BlockwiseDrafter:
        """Builds a drafter for `parts.target` that picks tokens as the rule prefers."""
        return cls(parts.target, **{**cls.by_rule(parts.prefers), **options})


DRAFTER = BlockwiseDrafter
