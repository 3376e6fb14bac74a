"""Decodes the rows of one call of `generate` with an engine, and ends them where transformers would.

An engine gives each row several tokens per step. Streamers and stopping criteria get them one by one, as transformers
passes them. Tests: tests/integrations/transformers/test_decoding.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec_fast.engine.engine import Engine
from specdec_fast.engine.request import Handle
from specdec_fast.integrations.transformers.row_processors import RowProcessor
from specdec_fast.sampling.params import SamplingParams

_READ_BY_ENGINE = ("MaxLengthCriteria", "EosTokenCriteria")
_BY_ROW = (*_READ_BY_ENGINE, "StopStringCriteria", "MaxTimeCriteria")
"""Stopping criteria of transformers that look at each row alone."""


@dataclass(slots=True)
class Row:
    """One row of the batch.

    Attributes:
        prompt: Its tokens without padding.
        params: Sampling parameters.
        processor: The processors that run as they are, or None.
        handle: Its request, once it is submitted.
        known: Number of its tokens that were handled.
        ended: Whether its text has ended. Further tokens of its request do not count.
        scores: Logits and scores [V] of each token, if they are kept.
    """

    prompt: Sequence[int]
    params: SamplingParams
    processor: RowProcessor | None
    scores: list[tuple[Tensor, Tensor]]
    handle: Handle | None = None
    known: int = 0
    ended: bool = False

    @property
    def tokens(self) -> list[int]:
        """The generated tokens, also those beyond the end of the text."""
        assert self.handle is not None
        return self.handle.tokens

    def has_all(self, count: int) -> bool:
        """Returns whether the engine ended the text, and `count` are all of its tokens."""
        handle = self.handle
        complete = handle is not None and handle.finish_reason in ("eos", "length")
        return complete and len(self.tokens) == count


class Decoding:
    """The rows of one call, from their submission to the tensors that `generate` returns.

    Args:
        engine: The engine.
        rows: The rows.
        input_ids: Their prompts with padding, int64 [B, n].
        criteria: Stopping criteria, a `StoppingCriteriaList`.
        max_length: Length of prompt and text at which all rows end.
        pad_id: Token behind the end of a text, or None.
        streamer: Gets the tokens of all rows, [B] per column, or None.
        output_scores: Whether criteria get the scores so far.
    """

    def __init__(
        self,
        engine: Engine,
        rows: Sequence[Row],
        input_ids: Tensor,
        criteria: Any,
        max_length: int,
        pad_id: int | None,
        streamer: Any,
        output_scores: bool = False,
    ) -> None:
        self._engine, self._rows, self._criteria, self._streamer = engine, rows, criteria, streamer
        self._output_scores, self._pad = output_scores, pad_id
        count, start = input_ids.shape
        self._ids = torch.full((count, max(max_length, start)), pad_id or 0, dtype=torch.int64)
        self._ids[:, :start] = input_ids
        self._start = self._length = start
        self._device, self._max_length = input_ids.device, max_length
        names = {type(each).__name__ if type(each).__module__.startswith("transformers.") else "" for each in criteria}
        # transformers pads a text behind its end only if there is an end-of-sequence id; else it goes on beside others
        self._pads = any(hasattr(each, "eos_token_id") for each in criteria)
        self._asks = not names <= set(_READ_BY_ENGINE)
        waits = count > 1 and (streamer is not None or not (names <= set(_BY_ROW) and self._pads))
        self._by_column = waits and (self._asks or streamer is not None)
        self._keeps_scores = any(row.processor is not None and row.processor.keeps_scores for row in rows)
        self._columns: list[tuple[Tensor, Tensor]] = []  # logits and scores, so far

    @property
    def handles(self) -> list[Handle]:
        """The requests of the rows."""
        return [row.handle for row in self._rows if row.handle is not None]

    def run(self) -> Tensor:
        """Decodes all rows.

        Returns:
            Prompts and texts, padded to the longest, int64 [B, n].

        Raises:
            RuntimeError: If the model is detached meanwhile.
            BaseException: Whatever a step, a processor, a criterion or the streamer raises. The requests of this call
                are cancelled first.
        """
        try:
            for row in self._rows:
                row.handle = self._engine.submit(row.prompt, row.params)
            if not (self._asks or self._streamer is not None or self._keeps_scores):
                self._run_engine()
            while not all(row.ended for row in self._rows):
                with self._engine.lock, torch.inference_mode():
                    if not all(handle.finished for handle in self.handles):
                        self._engine.step()
                    available = [self._read_row(row) for row in self._rows]
                if self._by_column:
                    self._take_columns(available)
                else:
                    for index, row in enumerate(self._rows):
                        self._take_row(index, row, available[index])
        finally:
            self._cancel(self._rows)
        return self._ids[:, : self._length].to(self._device)

    def _run_engine(self) -> None:
        """Runs steps until the engine has ended all texts. Nothing else looks at them before."""
        handles = self.handles
        with torch.inference_mode():  # entered once, not in every step
            while not all(handle.finished for handle in handles):
                self._engine.step()

    def _read_row(self, row: Row) -> int:
        """Takes the scores of new tokens. Returns the number of tokens."""
        count = len(row.tokens)
        if row.processor is not None and row.processor.keeps_scores and not (row.ended and self._pads):
            row.scores += row.processor.take_scores(row.tokens[:count], len(row.scores))
        return count

    def _take_row(self, index: int, row: Row, count: int) -> None:
        """Handles the new tokens of a row, one by one."""
        tokens = row.tokens
        if not (self._asks or self._streamer is not None):
            new = tokens[row.known : count]
            self._ids[index, self._start + row.known : self._start + count] = torch.tensor(new, dtype=torch.int64)
            row.known = count
            row.ended = row.has_all(count)
        while row.known < count and not row.ended:
            at = self._start + row.known
            self._ids[index, at] = tokens[row.known]
            row.known += 1
            stops = self._ask(slice(index, index + 1), at + 1) if self._asks else None
            if self._streamer is not None:
                self._streamer.put(self._ids[index : index + 1, at].clone())
            row.ended = row.has_all(row.known) if stops is None else bool(stops[0])
        self._length = max(self._length, self._start + row.known)
        if row.ended:
            self._cancel([row])
        else:
            self._check_going(row, count)

    def _take_columns(self, available: Sequence[int]) -> None:
        """Handles tokens of all rows side by side, as far as every row has them."""
        while not all(row.ended for row in self._rows):
            column = self._length - self._start
            waiting = [
                index for index, row in enumerate(self._rows)
                if available[index] <= column and not (row.ended and self._pads)
            ]  # fmt: skip
            for index in waiting:
                self._check_going(self._rows[index], available[index])
            if waiting:
                return
            for index, row in enumerate(self._rows):
                if not (row.ended and self._pads):
                    self._ids[index, self._length] = row.tokens[column]
                    row.known = column + 1
                elif self._pad is not None:
                    self._ids[index, self._length] = self._pad
            self._length += 1
            stops = self._ask(slice(None), self._length)
            if self._streamer is not None:
                self._streamer.put(self._ids[:, self._length - 1].clone())
            for row, stop in zip(self._rows, stops.tolist()):
                row.ended = row.ended or bool(stop)
            done = all(row.ended for row in self._rows)
            self._cancel(row for row in self._rows if row.ended and (self._pads or done))

    def _ask(self, rows: slice, length: int) -> Tensor:
        """Asks the stopping criteria about texts of a length. Returns bool [rows]."""
        ids = self._ids[rows, :length].to(self._device)
        scores = None
        if self._output_scores and (self._by_column or len(self._rows) == 1):
            scores = tuple(score for _, score in self.read_scores(length - self._start))
        found: Tensor = self._criteria(ids, scores)
        return found

    def read_scores(self, columns: int | None = None) -> list[tuple[Tensor, Tensor]]:
        """Returns logits and scores [B, V] of each column of tokens. They are 0 behind the end of a text.

        Args:
            columns: Number of columns. None for all, once the texts have ended.
        """
        kept = [row.scores for row in self._rows]
        blank = torch.zeros_like(next(scores[0][0] for scores in kept if scores))
        for at in range(len(self._columns), self._length - self._start if columns is None else columns):
            pairs = [
                row.scores[at] if at < (row.known if self._pads else len(row.scores)) else (blank, blank)
                for row in self._rows
            ]
            self._columns.append((torch.stack([raw for raw, _ in pairs]), torch.stack([score for _, score in pairs])))
        return self._columns

    def _check_going(self, row: Row, count: int) -> None:
        """Raises if a request has ended although its text has not."""
        handle = row.handle
        if handle is None or not handle.finished or len(handle.tokens) > count:
            return
        if handle.finish_reason == "cancelled":
            raise RuntimeError("generate: got detach(model) while it ran; expected it to end first; call it again")
        own = None if row.processor is None else row.processor.failures.get(tuple(handle.tokens))
        if own is not None:
            raise own
        if handle.error is not None:
            raise handle.error
        raise RuntimeError(f"generate: the engine ended a text early ({handle.finish_reason}); expected more tokens")

    def _cancel(self, rows: Iterable[Row]) -> None:
        """Ends requests that still run. All of them are cancelled, even if one raises."""
        with ExitStack() as ends:
            for row in rows:
                if row.handle is not None and not row.handle.finished:
                    ends.callback(self._engine.cancel, row.handle)
