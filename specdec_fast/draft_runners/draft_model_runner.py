"""A draft model whose rows follow those of the engine: what is committed stays, the trees that were drafted lie behind.

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
from specdec_fast.interfaces import Acceptance, StateView, TargetOutput
from specdec_fast.trees.logits_source import Staged


class DraftModelRunner:
    """model: a target of its own; vocab_size: the target's (draft ids beyond it are masked); name: the drafter's, for
    messages.

    Rows are given by number, as the engine counts them; the caller asks `room` before it stages anything.
    """

    token_ids: Tensor | None = None
    keeps = True

    def __init__(self, model: Any, vocab_size: int, name: str) -> None:
        self.model, self._name = model, name
        self.device: torch.device = model.device
        self.vocab_size = min(vocab_size, model.vocab_size)
        self._wider = vocab_size > model.vocab_size  # the target's padding ids may lie beyond the draft's embedding
        self._held: dict[int, tuple[int, Staged | None]] = {}  # per row: committed tokens held, the tree behind them
        self._scored: dict[int, int] = {}  # per row: nodes of the last pass over this tree, or more
        self._doubtful: set[int] = set()  # rows whose cache may hold more than that

    def begin(self, view: StateView, rows: Sequence[int], prompt_output: TargetOutput | None) -> None:
        """Rows join with nothing stored. Raises ValueError where the draft has fewer rows than the engine."""
        room = self.model.cache.max_rows
        if max(rows) >= room:
            raise ValueError(
                f"{self._name}: got row {max(rows)} of the engine and a draft with room for {room} rows; expected at "
                "least as many as the target has; build the draft with the target's max_rows"
            )
        for row in rows:
            self._held[row], self._scored[row] = (0, None), 0
        self._doubtful.update(rows)

    def room(self, row: int, tokens: int, length: int) -> bool:
        """Whether a row can hold `length` tokens."""
        return length <= self.model.max_length and bool(self.model.cache.reserve(row, length))

    def observe(self, view: StateView, draft: Draft, acceptance: Acceptance, output: TargetOutput) -> None:
        """Nothing: `catch_up` compares what is staged with what was committed."""

    def release(self, rows: Sequence[int]) -> None:
        """Rows leave."""
        self.model.cache.release([row for row in rows if self._held.pop(row, None) is not None])

    def catch_up(self, rows: Sequence[int], texts: Sequence[Sequence[int]]) -> None:
        """Keep what was accepted of the trees that are staged, forget the rest, feed what is new but the root."""
        device, cache = self.model.device, self.model.cache
        doubtful = [row for row in rows if row in self._doubtful]  # a pass over these raised, or there was none yet
        if doubtful:
            cache.rollback(doubtful, [self._held[row][0] for row in doubtful])
        self._doubtful.update(rows)
        self._scored.update(dict.fromkeys(rows, 0))
        kept: list[tuple[int, int, list[int]]] = []  # row, nodes staged, accepted path
        for row, text in zip(rows, texts):
            held, tree = self._held[row]
            path = [] if tree is None else tree.walk(text[held : len(text) - 1])
            if path:
                assert tree is not None
                kept.append((row, tree.num_nodes, path))
            else:
                self._held[row] = (held, None)
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
                self._held[row] = (self._held[row][0] + len(path), None)
        new = [(row, text[self._held[row][0] : -1]) for row, text in zip(rows, texts)]
        new = [(row, part) for row, part in new if part]
        if new:
            shape = chain_layout(tuple(row for row, _ in new), tuple(len(part) for _, part in new), device)
            fed = host_to_device([token for _, part in new for token in self._known(part)], torch.int64, device)
            self.model.extend(shape.rows, fed, shape.offsets, logits=False)
            for row, part in new:
                self._held[row] = (self._held[row][0] + len(part), None)
        self._doubtful.difference_update(rows)

    def score(self, rows: Sequence[int], draft: Draft) -> Tensor:
        """One pass over whole trees: what was staged behind the rows before is written over. Logits [M, V]."""
        for row, count in zip(rows, draft.counts):
            self._held[row] = (self._held[row][0], None)
            if count:  # a tree that grows no more is staged as it was
                self._scored[row] = count
        if self._wider:
            draft = replace(draft, tokens=torch.where(draft.tokens < self.model.vocab_size, draft.tokens, 0))
        output, _ = self.model.score(draft, draft.get_plan())
        assert output.logits is not None
        return output.logits

    def logits(self, scored: Tensor) -> Tensor:
        """Logits [N, vocab_size] of some rows of what `score` gave."""
        return scored if scored.shape[1] == self.vocab_size else scored[:, : self.vocab_size]

    def told(self, trees: Sequence[tuple[int, tuple[list[int], list[int]]]]) -> None:
        """What lies behind the rows: of each tree as many nodes as the last pass had of it."""
        for row, (tokens, parents) in trees:
            count = self._scored.get(row, 0)
            self._held[row] = (self._held[row][0], Staged(tokens[:count], parents[:count]))

    def _known(self, tokens: Sequence[int]) -> list[int]:
        """Tokens that the draft embeds: what stands in for others only costs acceptance."""
        size = self.model.vocab_size
        return [token if token < size else 0 for token in tokens]
