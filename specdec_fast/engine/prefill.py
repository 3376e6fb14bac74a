"""Prefill in slices: stores keys and values of committed tokens, one pass per step.

Passes may span several rows. Tests: tests/engine/test_prefill.py, tests/targets/test_aux_hidden_states.py,
tests/launch/test_uploads.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from specdec_fast.core.device_transfer import host_to_device
from specdec_fast.engine.prompt_scoring import PromptScores
from specdec_fast.engine.request import Handle
from specdec_fast.interfaces import Target, TargetOutput


class Prefill:
    """The rows whose tokens are not all stored yet, with the hidden states and log-probabilities of those that are.

    A row is complete before the next one begins. Rows stay here until `discard`, so that a failure at any place finds
    the rows whose keys and values are incomplete.

    Args:
        target: The model whose cache is filled.
        aux_hidden_states: Names of hidden states to collect, as in `Needs.aux_hidden_states`.
        device: Device of the target.
    """

    def __init__(self, target: Target, aux_hidden_states: Sequence[str], device: torch.device) -> None:
        self._target, self._names, self._device = target, aux_hidden_states, device
        self._left: dict[int, list[int]] = {}  # tokens to store by row, in order of admission
        self._parts: dict[int, list[dict[str, torch.Tensor]]] = {}
        self._stops: dict[int, list[int]] = {}  # by row: tokens that are left at places where its states are saved
        self._scores = PromptScores(target.vocab_size)

    def __contains__(self, row: int) -> bool:
        return row in self._left

    @property
    def rows(self) -> list[int]:
        """Rows that were added and not discarded, in order."""
        return list(self._left)

    @property
    def complete_rows(self) -> list[int]:
        """Rows whose tokens are all stored, in order."""
        return [row for row, tokens in self._left.items() if not tokens]

    def add(self, row: int, handle: Handle, tokens: Sequence[int]) -> None:
        """Adds a row.

        Args:
            row: The row. Its pages are reserved before the next pass.
            handle: Its request.
            tokens: Token ids to store behind what the row holds: all but the root, which is scored later.
        """
        self._left[row], self._parts[row], self._stops[row] = list(tokens), [], []
        self._scores.add_row(row, handle)

    def save_states(self, row: int, counts: Sequence[int]) -> None:
        """Makes the cache save the states of a row, which no pass has run yet, in its prefill.

        Args:
            row: The row.
            counts: Numbers of its tokens after which a pass ends and the states are saved, ascending.
        """
        self._stops[row] = [len(self._left[row]) - count for count in counts]

    def discard(self, row: int) -> None:
        """Drops a row, if it is here."""
        self._left.pop(row, None)
        self._parts.pop(row, None)
        self._stops.pop(row, None)
        self._scores.discard_row(row)

    def run(self, most: int) -> int:
        """Runs the next pass, if tokens are left.

        Args:
            most: Most tokens of the pass.

        Returns:
            The number of tokens that were stored.
        """
        batch = self._next_batch(most)
        if not batch:
            return 0
        lengths, places = [len(tokens) for _, tokens in batch], self._scores.places(batch)
        output = self._target.extend(
            host_to_device([row for row, _ in batch], torch.int32, self._device),
            host_to_device([token for _, tokens in batch for token in tokens], torch.int64, self._device),
            host_to_device([0, *accumulate(lengths)], torch.int32, self._device),
            logits=host_to_device(places, torch.int64, self._device) if places else False,
            aux_hidden_states=self._names,
        )
        if output.logits is not None:
            self._scores.add(batch, output.logits)
        cache: Any = self._target.cache
        parts = {name: states.split(lengths) for name, states in output.aux_hidden_states.items()}
        for at, (row, tokens) in enumerate(batch):
            self._left[row] = self._left[row][len(tokens) :]
            if self._stops[row] and self._stops[row][0] == len(self._left[row]):
                self._stops[row].pop(0)
                cache.snapshot(row)
            if parts:
                self._parts[row].append({name: each[at] for name, each in parts.items()})
        return sum(lengths)

    def _next_batch(self, most: int) -> list[tuple[int, list[int]]]:
        """The tokens of the next pass, by row."""
        batch: list[tuple[int, list[int]]] = []
        scored = 0
        for row, tokens in self._left.items():
            take = min(most, len(tokens) - next(iter(self._stops[row]), 0))
            limit = self._scores.limit(row, scored)
            if limit is not None:
                take = min(take, limit)
                scored += take
            if take:
                batch.append((row, tokens[:take]))
                most -= take
            if take < len(tokens):
                break
        return batch

    def collect(self, rows: Sequence[int]) -> TargetOutput | None:
        """Gives the requests of complete rows the log-probabilities of their prompts.

        Args:
            rows: The rows.

        Returns:
            Hidden states of all tokens of these rows by name, [M, hidden] each, row after row. None if there are none.
        """
        self._scores.publish(rows)
        parts = [part for row in rows for part in self._parts[row]]
        return (
            TargetOutput(None, {name: torch.cat([part[name] for part in parts]) for name in parts[0]})
            if parts
            else None
        )
