"""Runs a draft model for chains: rows follow those of the engine, and drafted tokens are stored behind committed ones.

The only writer of the draft's cache for drafter `draft_model`. `DraftTreeRunner` does the same for trees.
Tests: tests/drafters/test_draft_model.py, tests/drafters/test_whole_chains.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec_fast.core.chain_layout import ChainLayout, chain_layout
from specdec_fast.core.device_transfer import host_to_device
from specdec_fast.draft_runners.cross_vocab import CrossVocab, GrowingText
from specdec_fast.draft_runners.row_limit import check_row_limit
from specdec_fast.draft_runners.shared_prefixes import SharedPrefixes
from specdec_fast.interfaces import StateView
from specdec_fast.targets.huggingface import HuggingFaceTarget


class DraftChainRunner:
    """Keeps the rows of a draft model up to date with the committed texts.

    Args:
        model: The draft model, a target of its own.
        vocab_size: Vocabulary to draft from; ids beyond it are masked.
        tokenizers: "same", "tli" or "slem" (see drafter `draft_model`).
        translation: Translation between the two vocabularies. None if `tokenizers` is "same".
    """

    def __init__(
        self, model: HuggingFaceTarget, vocab_size: int, tokenizers: str, translation: CrossVocab | None
    ) -> None:
        keep_history = getattr(model.cache, "keep_history", None)
        if keep_history is not None:  # recurrent layers go back by their history
            keep_history()
        self.model, self.vocab_size = model, vocab_size
        self._tokenizers, self._translation = tokenizers, translation
        self._stored: dict[int, tuple[int, list[int]]] = {}  # per row: stored committed tokens, stored drafted tokens
        self._fed: dict[int, list[int]] = {}  # per row, with a translation: stored tokens of the draft
        self._texts: dict[int, GrowingText] = {}  # per row, with a translation: its text in the draft's tokens
        self._prefixes = SharedPrefixes(model, self._embeddable)

    def begin(self, view: StateView, rows: Sequence[int]) -> None:
        """Adds rows, with nothing stored.

        Args:
            view: Committed data.
            rows: Rows of the engine.

        Raises:
            ValueError: If the draft model has fewer rows than the engine.
        """
        check_row_limit("draft_model", rows, self.model)
        for row in rows:
            self._stored[row], self._fed[row] = (0, []), []
            if self._translation is not None:
                self._texts[row] = GrowingText(self._translation)
            if (begin_row := getattr(self.model, "begin_row", None)) is not None:
                # a text in another tokenizer may have any length
                begin_row(row, view.longest(row) if self._translation is None else self.model.max_length)
        if self._translation is None:
            self._prefixes.begin(view, rows)

    def release(self, rows: Sequence[int]) -> None:
        """Removes rows and gives back their pages. Unknown rows are ignored."""
        self.model.cache.release([row for row in rows if self._stored.pop(row, None) is not None])
        for row in rows:
            self._fed.pop(row, None)
            self._texts.pop(row, None)
            self._prefixes.release(row)

    def reserve(self, row: int, length: int) -> bool:
        """Reserves pages for `length` tokens of a row; returns whether they are available."""
        return length <= self.model.max_length and self.model.cache.reserve(row, length)

    def catch_up(self, rows: list[int], texts: list[Sequence[int]]) -> Tensor:
        """Drops rejected tokens and feeds new ones.

        Args:
            rows: B rows.
            texts: Their committed texts, in the draft's tokens.

        Returns:
            Masked logits [B, V] after the roots.
        """
        shape, fed = self.missing_tokens(rows, texts)
        output = self.model.extend(shape.rows, fed, shape.offsets, logits=shape.last)
        self.mark_stored(rows, texts)
        return self.mask_logits(output.logits)

    def missing_tokens(self, rows: list[int], texts: list[Sequence[int]]) -> tuple[ChainLayout, Tensor]:
        """Drops rejected tokens from the cache, and returns the tokens that must be fed.

        Args:
            rows: B rows.
            texts: Their committed texts, in the draft's tokens.

        Returns:
            The layout of the tokens, and the tokens int64 [M]. At least the root of every row is among them.
        """
        self._prefixes.store(rows, texts, self._note_stored)
        kept: list[int] = []
        fed: list[int] = []
        counts: list[int] = []
        for row, text in zip(rows, texts):
            start, drafted = self._stored[row]
            for token in drafted:  # accepted draft tokens are already stored
                if start >= len(text) or text[start] != token:
                    break
                start += 1
            if self._translation is not None:
                start = _common_prefix(self._fed[row], text)
            start = min(start, len(text) - 1)  # the root is always fed, since its logits are required
            start = self.model.cache.rollback_point(row, start)
            self._stored[row] = start, []  # holds even if the pass that follows is interrupted
            kept.append(start)
            fed.extend(self._embeddable(text[start:]))
            counts.append(len(text) - start)
        device = self.model.device
        self.model.cache.rollback(rows, kept)
        return chain_layout(tuple(rows), tuple(counts), device), host_to_device(fed, torch.int64, device)

    def mark_stored(self, rows: list[int], texts: list[Sequence[int]]) -> None:
        """Notes that the committed texts of rows are stored."""
        for row, text in zip(rows, texts):
            self._stored[row] = (len(text), [])
            self._prefixes.name_pages(row, text)
            if self._translation is not None:
                self._fed[row] = list(text)

    def _note_stored(self, row: int, count: int) -> None:
        """Notes that the first `count` tokens of a row are stored."""
        self._stored[row] = count, []

    def _embeddable(self, tokens: Sequence[int]) -> list[int]:
        """Tokens that the draft can embed. A substitute for others, padding of the target, costs acceptance only."""
        return [token if token < self.model.vocab_size else 0 for token in tokens]

    def mark_drafted(self, row: int, text: Sequence[int], drafted: Sequence[int]) -> None:
        """Notes that drafted tokens are stored behind a row's text: all but the last, which was not fed."""
        self._stored[row] = (len(text), list(drafted[:-1]))

    def leave_cuda_graph(self, row: int, length: int) -> None:
        """Notes that CUDA-graph steps have stored `length` tokens of a row that leaves them."""
        if row in self._stored:
            self._stored[row] = length, []

    def mask_logits(self, logits: Tensor | None) -> Tensor:
        """Returns logits over the vocabulary to draft from, [B, V]."""
        assert logits is not None
        if self._tokenizers == "tli" and self._translation is not None:
            return self._translation.to_target_logits(logits)
        return logits if logits.shape[1] == self.vocab_size else logits[:, : self.vocab_size]

    def draft_ids(self, tokens: Tensor) -> Tensor:
        """Returns the draft's ids of picked tokens, int64 [N]."""
        return self._translation.to_draft_ids(tokens) if self._tokenizers == "tli" and self._translation else tokens

    def to_draft(self, row: int, text: Sequence[int]) -> Sequence[int]:
        """Returns a row's committed text in the draft's tokens."""
        return text if self._translation is None else self._texts[row].to_draft(text)

    def to_target(self, row: int, text: Sequence[int], draft_text: Sequence[int], drafted: list[int]) -> list[int]:
        """Returns drafted tokens as the target's, and notes what the draft model was fed.

        Args:
            row: The row.
            text: Its committed text.
            draft_text: The same text in the draft's tokens.
            drafted: Drafted tokens.

        Returns:
            At most as many tokens of the target.
        """
        if self._translation is None:
            return drafted
        if self._tokenizers == "slem":
            self._fed[row] = [*draft_text, *drafted[:-1]]
            return self._translation.to_target(text, draft_text, drafted)[: len(drafted)]
        fed = host_to_device(drafted[:-1], torch.int64, self.model.device)
        self._fed[row] = [*draft_text, *self._translation.to_draft_ids(fed).tolist()]
        return drafted


def _common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common prefix, by bisection: slices compare faster than elements."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low
