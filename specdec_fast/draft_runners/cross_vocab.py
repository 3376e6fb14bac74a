"""Translates between the vocabularies of a target and of a draft model with another tokenizer.

TLI restricts the draft's distribution to tokens that both vocabularies contain. SLEM re-encodes the draft's text in the
target's tokens. Source: Timor et al. 2025 (heterogeneous vocabularies).
Tests: tests/draft_runners/test_cross_vocab.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_CONTEXT = 8  # tokens in front of a text that are encoded with it, since tokens may merge at the border
_WINDOW = 32  # tokens of a draft's text that are encoded again with new text; most of them do not change
_STARTS = 4  # starting points that are tried
_UNFINISHED = "\ufffd"  # ends a text whose last character is incomplete


class CrossVocab:
    """Translates between two tokenizers by text.

    Args:
        target: The target's transformers tokenizer.
        draft: The draft model's tokenizer.
        vocab_size: Valid ids of the target.
        draft_vocab_size: Valid ids of the draft model.
        device: Device of the tables.

    Attributes:
        target_ids: Target ids of the common tokens, int64 [N].
        draft_ids: Draft ids of the same tokens, int64 [N].
        word_starts: Draft ids of tokens that begin a word.

    Raises:
        ValueError: If a tokenizer is missing, or if there is no common token.
    """

    def __init__(
        self,
        target: Any,
        draft: Any,
        vocab_size: int,
        draft_vocab_size: int,
        device: torch.device | str = "cpu",
    ) -> None:
        if target is None or draft is None:
            whose = "target" if target is None else "draft"
            raise ValueError(f"translation: got no tokenizer of the {whose}; expected one for each model")
        self._target, self._draft = target, draft
        ours, theirs = _by_text(target, vocab_size), _by_text(draft, draft_vocab_size)
        common = sorted((ours[text], theirs[text]) for text in ours.keys() & theirs.keys())
        if not common:
            raise ValueError("translation: got tokenizers without a common token; expected some; take another draft")
        self.target_ids = torch.tensor([ours for ours, _ in common], dtype=torch.int64).to(device)
        self.draft_ids = torch.tensor([theirs for _, theirs in common], dtype=torch.int64).to(device)
        self._draft_of = torch.zeros(vocab_size, dtype=torch.int64, device=device)
        self._draft_of[self.target_ids] = self.draft_ids
        self._vocab_size = vocab_size
        self.word_starts = {index for text, index in theirs.items() if text.startswith("▁")}

    def text(self, tokens: Sequence[int], start: int = 0) -> str | None:
        """Returns the text of target tokens from `start` on. None if it depends on the tokens in front."""
        return _text_from(self._target, tokens, start)

    def draft_text(self, tokens: Sequence[int], start: int) -> str | None:
        """Returns the text of draft tokens from `start` on. None if it depends on the tokens in front."""
        return _text_from(self._draft, tokens, start)

    def encode(self, text: str) -> list[int]:
        """Returns the draft's tokens of a text."""
        return list(self._draft.encode(text, add_special_tokens=False))

    def to_draft(self, tokens: Sequence[int]) -> list[int]:
        """Returns a target text in the draft's tokens, at least one."""
        return self.encode(_text(self._target, tokens)) or [0]

    def to_target(self, tokens: Sequence[int], draft_text: Sequence[int], drafted: Sequence[int]) -> list[int]:
        """Re-encodes drafted tokens in the target's tokens.

        Args:
            tokens: The committed text in the target's tokens.
            draft_text: The same text in the draft's tokens. It shows whether the drafted text begins with a space.
            drafted: The drafted tokens.

        Returns:
            The drafted text in the target's tokens.
        """
        new = _text_from(self._draft, [*draft_text[-_CONTEXT:], *drafted], len(draft_text[-_CONTEXT:]))
        new = _text(self._draft, drafted) if new is None else new
        behind = _text(self._target, tokens[-_CONTEXT:])
        before = self._target.encode(behind, add_special_tokens=False)
        both = self._target.encode(behind + new, add_special_tokens=False)
        if both[: len(before)] == before:
            return list(both[len(before) :])
        return list(
            self._target.encode(new, add_special_tokens=False)
        )  # the new text alone: both together encode differently

    def to_target_logits(self, logits: Tensor) -> Tensor:
        """Spreads the draft's logits over the target's vocabulary, [B, V]; -inf for tokens that are not common."""
        full = logits.new_full((logits.shape[0], self._vocab_size), float("-inf"))
        full[:, self.target_ids] = logits[:, self.draft_ids]
        return full

    def to_draft_ids(self, tokens: Tensor) -> Tensor:
        """Returns the draft's ids of common target tokens, int64 [N]."""
        return self._draft_of[tokens]


class GrowingText:
    """A growing target text in the draft's tokens.

    Only the end is encoded again, from a word some tokens back. If that end does not begin as before, the whole text is
    encoded.

    Args:
        translation: The two tokenizers.
    """

    def __init__(self, translation: CrossVocab) -> None:
        self._translation = translation
        self._length, self._ids, self._end = 0, [0], ""  # tokens of the target, the draft's, the end of the text

    def to_draft(self, tokens: Sequence[int]) -> list[int]:
        """Returns what `CrossVocab.to_draft` returns for the whole text.

        Args:
            tokens: The target's tokens, which begin with those of the call before.
        """
        found = self._encode_end(tokens)
        if found is None:
            found = self._translation.text(tokens[-32 * _WINDOW :]) or "", self._translation.to_draft(tokens)
        text, ids = found
        if not text.endswith(_UNFINISHED):
            self._length, self._ids, self._end = len(tokens), ids, text[-64 * _WINDOW :]
        return ids

    def _encode_end(self, tokens: Sequence[int]) -> tuple[str, list[int]] | None:
        """The end of the text, and the whole text in the draft's tokens; None if the whole must be encoded again."""
        translation, ids, last = self._translation, self._ids, len(self._ids) - _WINDOW
        new = translation.text(tokens, self._length) if last >= _WINDOW else None
        if new is None:
            return None
        places = sorted(range(last, last - _WINDOW, -1), key=lambda at: ids[at] not in translation.word_starts)
        for first in places[:_STARTS]:
            end, known = translation.draft_text(ids, first), ids[first:-_CONTEXT]
            if end and self._end.endswith(end):
                for text in (end + new, (end + new).removeprefix(" ")):  # some tokenizers add a leading space
                    found = translation.encode(text)
                    if found[: len(known)] == known:
                        return self._end + new, ids[:first] + found
        return None


def _text_from(tokenizer: Any, tokens: Sequence[int], start: int) -> str | None:
    """The text of tokens from `start` on, decoded with a few tokens in front; None if it changes their text."""
    behind = max(start - _CONTEXT, 0)
    before, whole = _text(tokenizer, tokens[behind:start]), _text(tokenizer, tokens[behind:])
    return whole[len(before) :] if whole.startswith(before) else None


def _text(tokenizer: Any, tokens: Sequence[int]) -> str:
    return str(tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _by_text(tokenizer: Any, vocab_size: int) -> dict[str, int]:
    """Ids by token text, with one sign for a leading space."""
    return {token.replace("Ġ", "▁"): index for token, index in tokenizer.get_vocab().items() if index < vocab_size}
