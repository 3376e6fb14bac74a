"""A small draft model drafts a tree level by level, over a paged cache of its own (SpecInfer, Sequoia, EAGLE-2).

specdec_fast/trees/expansion.py says how trees grow and how siblings are picked. Tests:
tests/drafters/test_draft_tree.py and the contract suite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from specdec_fast.draft_runners.draft_tree_runner import DraftTreeRunner
from specdec_fast.interfaces import DrafterParts, Needs
from specdec_fast.targets.huggingface import HuggingFaceTarget
from specdec_fast.trees.expansion import TreeDrafter
from specdec_fast.trees.static_shape import Shape, read_shape, shape_of_widths

PREFERRED = {"sampled": "hybrid", "greedy": "top_k"}
"""Option `how` for a rule's `prefers`; "coupled" means the same here."""


class DraftTreeDrafter(TreeDrafter):
    """Drafts trees with a small model.

    Every level is one pass over the whole tree so far. Keys and values of accepted nodes are kept.

    Args:
        model: The draft model, a target of its own. Its rows follow those of the engine.
        widths: Children per node by level. (3, 2, 1): three children, two for each of them, one for each of those.
        num_draft_tokens: Default budget per row. None: all nodes of a static tree, 24 of a dynamic one.
        how: How siblings are picked: one of `specdec_fast.trees.sibling_picking.HOWS`, or a rule's `prefers`.
        vocab_size: Vocabulary of the target; draft ids beyond it are masked. None: the draft model's.
        shape: Static tree in place of `widths`: a list of parents, or a file of `specdec tune tree`.
        depth: Levels of a dynamic tree. 0: a static tree.
        width: Nodes that grow per level of a dynamic tree, and children considered for each of them.
        sharpness: Exponent on the draft's distribution in the scores of a dynamic tree. A draft model's first choices
            are accepted more often than its probabilities say.

    Raises:
        ValueError: If an option is out of range or two options contradict each other.

    Source:
        Miao et al. 2024 (SpecInfer); Chen et al. 2024 (Sequoia); Li et al. 2024 (EAGLE-2), section 4, for dynamic
        trees.
    """

    name = "draft_tree"
    takes_draft = draws = True
    apart: ClassVar = {"how": "without_replacement"}
    needs = Needs(topology="tree", own_cache=True)

    def __init__(
        self,
        model: HuggingFaceTarget,
        widths: Sequence[int] = (3, 2, 1),
        num_draft_tokens: int | None = None,
        how: str = "coupled",
        vocab_size: int | None = None,
        shape: str | Path | Sequence[int] | None = None,
        depth: int = 0,
        width: int = 8,
        sharpness: float = 2.0,
    ) -> None:
        how = PREFERRED.get(how, how)
        if not widths or any(each < 1 for each in widths):
            raise ValueError(f"draft_tree widths: got {tuple(widths)}; expected one number of at least 1 per level")
        if depth and shape is not None:
            raise ValueError(f"draft_tree depth: got {depth} with a shape; expected depth=0, or no shape")
        source = DraftTreeRunner(model, vocab_size or model.vocab_size, self.name)
        if shape is None:
            wanted = shape_of_widths(widths)
        else:
            wanted = read_shape(shape) if isinstance(shape, (str, Path)) else Shape(tuple(shape))
        super().__init__(
            source, wanted, depth=depth, width=width, sharpness=sharpness, num_draft_tokens=num_draft_tokens, how=how
        )
        self.needs = replace(self.needs, vocab_size=source.vocab_size)
        self.model = model

    @staticmethod
    def by_rule(prefers: str) -> dict[str, Any]:
        """Returns the defaults of options that follow from the rule."""
        return {"how": prefers}

    @classmethod
    def from_parts(cls, parts: DrafterParts, **options: Any) -> DraftTreeDrafter:
        """Builds a drafter over the caller's draft model that picks tokens as the rule prefers."""
        assert parts.draft is not None
        model: Any = parts.draft()
        how = "top_k" if options.get("depth") and parts.prefers == "sampled" else parts.prefers
        return cls(model, **{**cls.by_rule(how), "vocab_size": parts.target.vocab_size, **options})


DRAFTER = DraftTreeDrafter
