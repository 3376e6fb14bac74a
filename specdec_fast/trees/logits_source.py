"""The source of draft logits that trees grow by: rows follow those of the engine.

specdec_fast/draft_runners/ has two: `DraftTreeRunner` over a draft model and `HeadRunner` over a trained head.
Tests: tests/drafters/test_draft_tree.py, tests/draft_runners/test_head_runner.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specdec_fast.core.draft import Draft
from specdec_fast.interfaces import Acceptance, StateView, TargetOutput


@dataclass(frozen=True, slots=True)
class Staged:
    """The tree whose keys and values are stored behind a row's committed tokens.

    Attributes:
        tokens: Tokens, root first.
        parents: Parents, -1 for the root.
    """

    tokens: list[int]
    parents: list[int]

    @property
    def num_nodes(self) -> int:
        """Nodes, root included."""
        return len(self.tokens)

    def match_path(self, text: Sequence[int]) -> list[int]:
        """Returns the nodes that hold a text, from the root on, as far as the tree contains it."""
        path: list[int] = []
        for token in text:
            parent = path[-1] if path else -1
            following = (
                node for node, above in enumerate(self.parents) if above == parent and self.tokens[node] == token
            )
            node = next(following, None)
            if node is None:
                break
            path.append(node)
        return path


class Source(Protocol):
    """A model whose logits trees grow by, over a cache of its own. Its rows follow those of the engine.

    Attributes:
        device: Device of the logits.
        vocab_size: V of the target.
        token_ids: Target ids of the columns of the logits, int64 [Vd], ascending. None: the first Vd ids.
        keeps_staged_keys: Keys and values of accepted nodes are kept, so `record_trees` must report what was staged.
    """

    device: torch.device
    vocab_size: int
    token_ids: Tensor | None
    keeps_staged_keys: bool

    def begin(self, view: StateView, rows: Sequence[int], prompt_output: TargetOutput | None) -> None:
        """Adds rows, after their prefill."""
        ...

    def reserve(self, row: int, tokens: int, length: int) -> bool:
        """Reserves space for a row.

        Args:
            row: The row.
            tokens: Committed tokens of the row.
            length: Tokens that it must hold, staged nodes included.

        Returns:
            False if the row cannot be drafted for now.
        """
        ...

    def catch_up(self, rows: Sequence[int], texts: Sequence[Sequence[int]]) -> None:
        """Stores the committed tokens of rows that are not stored yet, all but the roots."""
        ...

    def score(self, rows: Sequence[int], draft: Draft) -> Tensor:
        """Runs one pass over whole trees, one per row.

        Args:
            rows: Rows of the trees.
            draft: Packed trees of M nodes. Its `counts` may be bounds.

        Returns:
            The argument of `logits`, [M, any].
        """
        ...

    def logits(self, scored: Tensor) -> Tensor:
        """Returns the logits [N, Vd] of N rows of a result of `score`."""
        ...

    def record_trees(self, trees: Sequence[tuple[int, tuple[list[int], list[int]]]]) -> None:
        """Reports the trees that were staged while they grew.

        Args:
            trees: (row, (tokens, parents)), all nodes; -1 for no token.
        """
        ...

    def observe(self, view: StateView, draft: Draft, acceptance: Acceptance, output: TargetOutput) -> None:
        """Observes the result of a step."""
        ...

    def release(self, rows: Sequence[int]) -> None:
        """Removes rows and frees their data."""
        ...
