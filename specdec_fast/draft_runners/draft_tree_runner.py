"""Runs a draft model for trees: rows follow those of the engine, and drafted trees are stored behind committed tokens.

The only writer of the draft's cache for drafters of trees. Tests: tests/drafters/test_draft_tree.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from specdec_fast.core.chain_layout import chain_layout
from specdec_fast.core.device_transfer import host_to_device, table_to_device
from specdec_fast.core.draft import Draft
from specdec_fast.draft_runners.row_limit import check_row_limit
from specdec_fast.draft_runners.shared_prefixes import SharedPrefixes
from specdec_fast.interfaces import Acceptance, StateView, TargetOutput
from specdec_fast.trees.logits_source import Staged


class DraftTreeRunner:
    """A source of logits over a draft model (`specdec_fast.trees.logits_source.Source`).

    Rows are numbered as in the engine. The caller reserves pages before it stages anything.

    Args:
        model: The draft model, a target of its own.
        vocab_size: Vocabulary of the target; draft ids beyond it are masked.
        name: Name of the drafter, for messages.
    """

    token_ids: Tensor | None = None
    keeps_staged_keys = True

    def __init__(self, model: Any, vocab_size: int, name: str) -> None:
        self.model, self._name = model, name
        # records of recurrent layers belong to one pass, so accepted nodes are fed again
        self._keeps_paths = model.cache.why_no_rollback is None
        self.device: torch.device = model.device
        self.vocab_size = min(vocab_size, model.vocab_size)
        self._has_fewer_ids = vocab_size > model.vocab_size  # the target's padding ids may exceed the draft's embedding
        # per row: stored committed tokens, the tree behind them
        self._stored: dict[int, tuple[int, Staged | None]] = {}
        self._scored: dict[int, int] = {}  # per row: upper bound of the nodes in the last pass
        self._uncertain: set[int] = set()  # rows whose cache may hold more than that
        self._prefixes = SharedPrefixes(model, self._replace_unknown)

    def begin(self, view: StateView, rows: Sequence[int], prompt_output: TargetOutput | None) -> None:
        """Adds rows, with nothing stored. Raises ValueError if the draft model has fewer rows than the engine."""
        check_row_limit(self._name, rows, self.model)
        begin_row = getattr(self.model, "begin_row", None)
        for row in rows:
            self._stored[row], self._scored[row] = (0, None), 0
            if begin_row is not None:
                begin_row(row, view.longest(row))
        self._uncertain.update(rows)
        self._prefixes.begin(view, rows)

    def reserve(self, row: int, tokens: int, length: int) -> bool:
        """Reserves pages for `length` tokens of a row; returns whether they are available."""
        return length <= self.model.max_length and bool(self.model.cache.reserve(row, length))

    def observe(self, view: StateView, draft: Draft, acceptance: Acceptance, output: TargetOutput) -> None:
        """Does nothing: `catch_up` compares staged trees with committed tokens."""

    def release(self, rows: Sequence[int]) -> None:
        """Removes rows and gives back their pages."""
        self.model.cache.release([row for row in rows if self._stored.pop(row, None) is not None])
        for row in rows:
            self._prefixes.release(row)

    def catch_up(self, rows: Sequence[int], texts: Sequence[Sequence[int]]) -> None:
        """Keeps accepted nodes of staged trees, drops the others, and feeds new tokens, all but the root."""
        device, cache = self.model.device, self.model.cache
        self._prefixes.store(rows, texts, self._note_stored)
        uncertain = [row for row in rows if row in self._uncertain]  # a pass over these failed, or there was none yet
        if uncertain:
            for row in uncertain:
                self._stored[row] = (cache.rollback_point(row, self._stored[row][0]), self._stored[row][1])
            cache.rollback(uncertain, [self._stored[row][0] for row in uncertain])
        self._uncertain.update(rows)
        self._scored.update(dict.fromkeys(rows, 0))
        kept: list[tuple[int, int, list[int]]] = []  # row, nodes staged, accepted path
        for row, text in zip(rows, texts):
            stored, tree = self._stored[row]
            path = [] if tree is None or not self._keeps_paths else tree.match_path(text[stored : len(text) - 1])
            if path:
                assert tree is not None
                kept.append((row, tree.num_nodes, path))
            else:
                self._stored[row] = (stored, None)
        if kept:
            shape = chain_layout(tuple(row for row, *_ in kept), tuple(staged for _, staged, _ in kept), device)
            slots = cache.stage(shape.rows, shape.offsets, sum(staged for _, staged, _ in kept))
            starts = accumulate((staged for _, staged, _ in kept), initial=0)
            width = max(len(path) for *_, path in kept)
            paths = [
                [start + node for node in path] + [-1] * (width - len(path)) for start, (*_, path) in zip(starts, kept)
            ]
            accepted = host_to_device([len(path) - 1 for *_, path in kept], torch.int32, device)
            cache.commit(shape.rows, slots, table_to_device(paths, torch.int32, device), accepted)
            for row, _, path in kept:
                self._stored[row] = (self._stored[row][0] + len(path), None)
        new = [(row, text[self._stored[row][0] : -1]) for row, text in zip(rows, texts)]
        new = [(row, part) for row, part in new if part]
        if new:
            shape = chain_layout(tuple(row for row, _ in new), tuple(len(part) for _, part in new), device)
            fed = host_to_device(
                [token for _, part in new for token in self._replace_unknown(part)], torch.int64, device
            )
            self.model.extend(shape.rows, fed, shape.offsets, logits=False)
            for row, part in new:
                self._stored[row] = (self._stored[row][0] + len(part), None)
        self._uncertain.difference_update(rows)
        for row, text in zip(rows, texts):
            self._prefixes.name_pages(row, text)

    def score(self, rows: Sequence[int], draft: Draft) -> Tensor:
        """Runs one pass over whole trees, which replace the trees staged before; returns logits [M, V]."""
        for row, count in zip(rows, draft.counts):
            self._stored[row] = (self._stored[row][0], None)
            if count:  # a tree that grows no more stays staged
                self._scored[row] = count
        if self._has_fewer_ids:
            draft = replace(draft, tokens=torch.where(draft.tokens < self.model.vocab_size, draft.tokens, 0))
        output, _ = self.model.score(draft, draft.get_plan())
        assert output.logits is not None
        return output.logits

    def logits(self, scored: Tensor) -> Tensor:
        """Returns the logits [N, vocab_size] of rows of a result of `score`."""
        return scored if scored.shape[1] == self.vocab_size else scored[:, : self.vocab_size]

    def record_trees(self, trees: Sequence[tuple[int, tuple[list[int], list[int]]]]) -> None:
        """Notes the staged trees: the nodes of each that the last pass scored."""
        for row, (tokens, parents) in trees:
            count = self._scored.get(row, 0)
            self._stored[row] = (self._stored[row][0], Staged(tokens[:count], parents[:count]))

    def _note_stored(self, row: int, count: int) -> None:
        """Notes that the first `count` tokens of a row are stored."""
        self._stored[row] = count, None

    def _replace_unknown(self, tokens: Sequence[int]) -> list[int]:
        """Tokens that the draft can embed. A substitute for others costs acceptance only."""
        size = self.model.vocab_size
        return [token if token < size else 0 for token in tokens]
