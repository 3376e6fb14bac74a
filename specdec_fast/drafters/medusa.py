"""Medusa heads draft a static sparse tree from the hidden state before the root (Cai et al. 2024, section 2).

Tokens are chosen, by the logits of the heads or with the target's own replay noise, and verified by any rule that takes
trees; the paper's typical acceptance is not used, so the text is the target's. Tests: tests/drafters/test_medusa.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from specdec_fast.draft_runners.parallel_heads import ParallelHeadsDrafter
from specdec_fast.heads.checkpoint import bundled_head, read_json
from specdec_fast.heads.checkpoint_medusa import load_medusa
from specdec_fast.heads.medusa import MedusaHeads
from specdec_fast.interfaces import DrafterParts
from specdec_fast.trees.topology import Shape, read_shape

PUBLISHED = Path(__file__).parents[1] / "assets" / "medusa-trees.json"
DEFAULT, TREE = "mc_sim_7b_63", "tree.json"


@lru_cache(maxsize=1)
def published_trees() -> dict[str, Shape]:
    """The authors' trees of 63 nodes by the names that they gave them; the file says where they are from."""
    return {name: Shape(tuple(parents)) for name, parents in read_json(PUBLISHED)["trees"].items()}


def _shape(wanted: str | Path | Sequence[int]) -> Shape:
    if not isinstance(wanted, (str, Path)):
        return Shape(tuple(wanted))
    named = published_trees().get(str(wanted))
    if named is None and not Path(wanted).exists():
        raise ValueError(
            f"medusa shape: got {str(wanted)!r}; expected a file, a list of parents or one of "
            f"{', '.join(published_trees())}"
        )
    return read_shape(wanted) if named is None else named


class MedusaDrafter(ParallelHeadsDrafter):
    """Drafts with Medusa heads over the target's last hidden state.

    head: folder or hub id of the heads, or the heads themselves (default: those that are bundled for the target);
    shape: a published tree by name, a list of parents, or a file (default: `tree.json` beside the heads, where training
    puts one, else "mc_sim_7b_63"); a budget of n nodes takes the first n; num_draft_tokens: the default budget per row;
    pick: "coupled" for `replay`, "greedy" for other rules; num_heads: how many heads of a file to use (default: all).

    Raises ValueError for heads that cannot be loaded or belong to another target.
    """

    name = "medusa"

    def __init__(
        self,
        target: Any,
        head: str | Path | MedusaHeads | None = None,
        num_draft_tokens: int | None = 16,
        shape: str | Path | Sequence[int] | None = None,
        pick: str = "coupled",
        num_heads: int | None = None,
    ) -> None:
        tree = _shape(DEFAULT if shape is None else shape)
        if not isinstance(head, MedusaHeads):
            place = bundled_head(target, self.name) if head is None else head
            if shape is None and (Path(place) / TREE).is_file():
                tree = read_shape(Path(place) / TREE)
            head = load_medusa(
                place, hidden_size=target.hidden_size, vocab_size=target.num_embeddings, num_heads=num_heads
            )
            head = head.to(device=target.device, dtype=target.dtype)
        elif num_heads is not None:
            raise ValueError(
                f"medusa num_heads: got {num_heads} with heads that are open; expected it with a folder or hub id; "
                "leave it out, or pass where the heads lie"
            )
        super().__init__(target, head, tree, num_draft_tokens, pick)

    @staticmethod
    def by_rule(prefers: str) -> dict[str, Any]:
        """Defaults where it is made for a rule."""
        return {"pick": "coupled" if prefers == "coupled" else "greedy"}

    @classmethod
    def from_parts(cls, parts: DrafterParts, **options: Any) -> MedusaDrafter:
        """For the target at hand, picking with its noise where the rule replays."""
        return cls(parts.target, **{**cls.by_rule(parts.prefers), **options})


DRAFTER = MedusaDrafter
