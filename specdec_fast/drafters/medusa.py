"""Medusa: several heads draft a static sparse tree from the hidden state before the root (Cai et al. 2024).

Tokens are deterministic: picked by the logits of the heads, or with the target's replay noise. Every rule that takes
trees may verify them. The paper's typical acceptance is not used, so the text is the target's.
Tests: tests/drafters/test_medusa.py.
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
from specdec_fast.trees.static_shape import Shape, read_shape

PUBLISHED = Path(__file__).parents[1] / "assets" / "medusa-trees.json"
DEFAULT, TREE = "mc_sim_7b_63", "tree.json"


@lru_cache(maxsize=1)
def published_trees() -> dict[str, Shape]:
    """Returns the authors' trees of 63 nodes by their published names."""
    return {name: Shape(tuple(parents)) for name, parents in read_json(PUBLISHED)["trees"].items()}


def _resolve_shape(wanted: str | Path | Sequence[int]) -> Shape:
    """The tree of option `shape`."""
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
    """Drafts a static tree with Medusa heads over the target's last hidden state.

    Args:
        target: The target to draft for.
        head: Folder or hub id of the heads, or loaded heads. None: the heads bundled for the target.
        num_draft_tokens: Default budget per row. None: all nodes of the tree. A budget of n uses the first n nodes.
        shape: Name of a published tree, a list of parents, or a file. None: `tree.json` beside the heads if training
            wrote one, else "mc_sim_7b_63".
        pick: "coupled" picks tokens with the noise of rule `replay`, "greedy" by the logits alone.
        num_heads: Heads of a checkpoint to use. None: all.

    Raises:
        ValueError: If the heads cannot be loaded or belong to another target, or if an option is out of range.

    Source:
        Cai et al. 2024 (Medusa), section 2.
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
        tree = _resolve_shape(DEFAULT if shape is None else shape)
        if not isinstance(head, MedusaHeads):
            place = bundled_head(target, self.name) if head is None else head
            if shape is None and (Path(place) / TREE).is_file():
                tree = read_shape(Path(place) / TREE)
            head = load_medusa(place, target, num_heads)
            head = head.to(device=target.device, dtype=target.dtype)
        elif num_heads is not None:
            raise ValueError(
                f"medusa num_heads: got {num_heads} with loaded heads; expected a folder or hub id as head; "
                "leave num_heads out, or pass the folder"
            )
        super().__init__(target, head, tree, num_draft_tokens, pick)

    @staticmethod
    def by_rule(prefers: str) -> dict[str, Any]:
        """Returns the defaults of options that follow from the rule."""
        return {"pick": "coupled" if prefers == "coupled" else "greedy"}

    @classmethod
    def from_parts(cls, parts: DrafterParts, **options: Any) -> MedusaDrafter:
        """Builds a drafter for `parts.target` that picks tokens as the rule prefers."""
        return cls(parts.target, **{**cls.by_rule(parts.prefers), **options})


DRAFTER = MedusaDrafter
