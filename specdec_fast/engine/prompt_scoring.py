"""Log-probabilities of prompts, collected during the prefill.

Logits of a few tokens exist at a time, never those of a whole prompt. A request that asks for them computes its whole
prompt, since shared pages have no logits. Tests: tests/engine/test_prompt_logprobs.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from specdec_fast.engine.request import Handle
from specdec_fast.sampling.logprobs import TokenLogprob, logprobs_of_tokens

_MAX_LOGITS = 2**24
"""Most logits of a pass: 64 MiB in float32."""


def needs_scoring(handle: Handle) -> bool:
    """Returns whether the next prefill of a request computes the log-probabilities of its prompt."""
    return handle.params.prompt_logprobs is not None and handle.prompt_logprobs is None


class PromptScores:
    """The log-probabilities of the prompts that are being prefilled.

    Args:
        vocab_size: V of the target.
    """

    def __init__(self, vocab_size: int) -> None:
        self._handles: dict[int, Handle] = {}
        self._found: dict[int, list[TokenLogprob | None]] = {}
        self._vocab_size = vocab_size

    def add_row(self, row: int, handle: Handle) -> None:
        """Adds a row, if its request needs scoring."""
        if needs_scoring(handle):
            self._handles[row], self._found[row] = handle, [None]

    def discard_row(self, row: int) -> None:
        """Drops a row, if it is here."""
        self._handles.pop(row, None)
        self._found.pop(row, None)

    def limit(self, row: int, scored: int) -> int | None:
        """Returns the most tokens of a row that a pass may store, or None if the row needs no logits.

        Args:
            row: The row.
            scored: Tokens of the pass whose logits are needed already.
        """
        return max(_MAX_LOGITS // self._vocab_size, 1) - scored if self._missing(row) else None

    def _missing(self, row: int) -> int:
        """The number of prompt tokens of a row that have no log-probability yet."""
        return len(self._handles[row].prompt) - len(self._found[row]) if row in self._handles else 0

    def places(self, batch: Sequence[tuple[int, Sequence[int]]]) -> list[int]:
        """Returns the packed indices of the tokens of a pass whose logits are needed.

        Args:
            batch: Rows of the pass with their tokens.
        """
        found: list[int] = []
        start = 0
        for row, tokens in batch:
            found += range(start, start + min(len(tokens), self._missing(row)))
            start += len(tokens)
        return found

    def add(self, batch: Sequence[tuple[int, Sequence[int]]], logits: Tensor) -> None:
        """Takes the logits of a pass.

        Args:
            batch: Rows of the pass with their tokens.
            logits: Logits after the tokens at `places(batch)`, [N, V].
        """
        start = 0
        for row, tokens in batch:
            count = min(len(tokens), self._missing(row))
            if count:
                handle, found = self._handles[row], self._found[row]
                following = handle.prompt[len(found) : len(found) + count]
                assert handle.params.prompt_logprobs is not None
                found += logprobs_of_tokens(logits[start : start + count], following, handle.params.prompt_logprobs)
                start += count

    def publish(self, rows: Sequence[int]) -> None:
        """Gives the requests of rows their log-probabilities, after the last pass of these rows."""
        for row in self._handles.keys() & set(rows):
            self._handles[row].prompt_logprobs = self._found[row]
