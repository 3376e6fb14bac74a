"""A small model drafts a tree, level by level, over a paged cache of its own (SpecInfer, Sequoia, EAGLE-2).

How trees grow and siblings are picked: specdec_fast/trees/expansion.py. Tests: tests/drafters/test_draft_tree.py and
the contract suite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from specdec_fast.draft_runners.draft_model_runner import DraftModelRunner
from specdec_fast.interfaces import DrafterParts, Needs
from specdec_fast.targets.huggingface import HuggingFaceTarget
from specdec_fast.trees.expansion import TreeDrafter
from specdec_fast.trees.topology import Shape, read_shape, shape_of_widths

PREFERRED = {"sampled": "hybrid", "greedy": "top_k"}
"""What to do for a rule that `prefers` so; its "coupled" means the same here."""


class DraftTreeDrafter(TreeDrafter):
    """Drafts with `model`, a target of its own whose rows mirror those of the engine.

    widths: children of each node by level, (3, 2, 1): three, two for each of them, one for each of those; shape: in
    place of widths, a list of parents or a file of `specdec tune tree`; depth: above 0, levels of a dynamic tree in
    place of a static one, `width` nodes of each grown, `width` children looked at of each, scored as if the draft's
    distribution were raised to the power `sharpness` (its first choices come true more often than it says);
    num_draft_tokens: the default budget per row (default: all of a static tree, 24 of a dynamic one); how: one of
    `HOWS`, or a rule's `prefers`; vocab_size: the target's (draft ids beyond it are masked).

    A pass per level runs over the tree so far, because tree attention takes whole trees; the keys and values of what is
    accepted move to the front and stay.
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
        source = DraftModelRunner(model, vocab_size or model.vocab_size, self.name)
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
        """Defaults where it is made for a rule."""
        return {"how": prefers}

    @classmethod
    def from_parts(cls, parts: DrafterParts, **options: Any) -> DraftTreeDrafter:
        """Over the draft model that was given, picking tokens as the rule prefers."""
        assert parts.draft is not None
        model: Any = parts.draft()
        how = "top_k" if options.get("depth") and parts.prefers == "sampled" else parts.prefers
        return cls(model, **{**cls.by_rule(how), "vocab_size": parts.target.vocab_size, **options})


DRAFTER = DraftTreeDrafter
