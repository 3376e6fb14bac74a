"""Between the vocabularies of a target and of a draft model that has another tokenizer, by way of the text.

Timor et al. 2025 (heterogeneous vocabularies): TLI restricts the draft's distribution to the tokens that both know,
SLEM hands over what the draft's text is in the target's tokens. Tests: tests/draft_runners/test_cross_vocab.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_BEHIND = 8  # tokens that are written anew with a text behind them: where they meet, tokens may join
_WINDOW = 32  # tokens of a draft's text that are encoded anew with what is new, most of which stay as they are
_STARTS = 4  # places in front of them that are tried
_UNFINISHED = "\ufffd"  # the end of a text whose last character has bytes to come


class CrossVocab:
    """target, draft: transformers tokenizers; vocab_size, draft_vocab_size: valid ids of the two models.

    Raises ValueError when a tokenizer is missing or when they have no token in common.
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
            raise ValueError(f"translation: got no tokenizer of the {whose}; expected one beside each model")
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
        """What the target wrote from a token on: None where that cannot be told from what is in front."""
        return _text_from(self._target, tokens, start)

    def draft_text(self, tokens: Sequence[int], start: int) -> str | None:
        """The same of a text in the draft's tokens."""
        return _text_from(self._draft, tokens, start)

    def encode(self, text: str) -> list[int]:
        """The draft's tokens of a text."""
        return list(self._draft.encode(text, add_special_tokens=False))

    def to_draft(self, tokens: Sequence[int]) -> list[int]:
        """A text of the target in the draft's tokens: at least one."""
        return self.encode(_text(self._target, tokens)) or [0]

    def to_target(self, tokens: Sequence[int], held: Sequence[int], drafted: Sequence[int]) -> list[int]:
        """What the draft's tokens are in the target's, behind its text so far. held: that text in the draft's tokens,
        by which a space in front of the first drafted one is known.
        """
        new = _text_from(self._draft, [*held[-_BEHIND:], *drafted], len(held[-_BEHIND:]))
        new = _text(self._draft, drafted) if new is None else new
        behind = _text(self._target, tokens[-_BEHIND:])
        before = self._target.encode(behind, add_special_tokens=False)
        both = self._target.encode(behind + new, add_special_tokens=False)
        if both[: len(before)] == before:
            return list(both[len(before) :])
        return list(self._target.encode(new, add_special_tokens=False))  # the seam would be cut elsewhere

    def dist(self, logits: Tensor) -> Tensor:
        """The draft's logits [B, V] over the target's vocabulary, -inf for tokens that only one of the two has."""
        full = logits.new_full((logits.shape[0], self._vocab_size), float("-inf"))
        full[:, self.target_ids] = logits[:, self.draft_ids]
        return full

    def ids(self, tokens: Tensor) -> Tensor:
        """The draft's ids of common tokens, int64 [N]."""
        return self._draft_of[tokens]


class GrowingText:
    """A text of the target that grows, in the draft's tokens. Only its end is encoded anew, from a word a few tokens
    back on; where that end does not begin as it did before, the whole text is.
    """

    def __init__(self, translation: CrossVocab) -> None:
        self._between = translation
        self._length, self._ids, self._end = 0, [0], ""  # tokens of the target, the draft's, the end of the text

    def to_draft(self, tokens: Sequence[int]) -> list[int]:
        """What `CrossVocab.to_draft` says of the text as it is now. tokens: the target's, of which those of the call
        before are the first.
        """
        found = self._grown(tokens)
        if found is None:
            found = self._between.text(tokens[-32 * _WINDOW :]) or "", self._between.to_draft(tokens)
        text, ids = found
        if not text.endswith(_UNFINISHED):
            self._length, self._ids, self._end = len(tokens), ids, text[-64 * _WINDOW :]
        return ids

    def _grown(self, tokens: Sequence[int]) -> tuple[str, list[int]] | None:
        """The text's end, and the whole of it in the draft's tokens; None where the two do not meet."""
        between, ids, last = self._between, self._ids, len(self._ids) - _WINDOW
        new = between.text(tokens, self._length) if last >= _WINDOW else None
        if new is None:
            return None
        places = sorted(range(last, last - _WINDOW, -1), key=lambda at: ids[at] not in between.word_starts)
        for first in places[:_STARTS]:
            end, known = between.draft_text(ids, first), ids[first:-_BEHIND]
            if end and self._end.endswith(end):
                for text in (end + new, (end + new).removeprefix(" ")):  # some tokenizers put a space in front
                    found = between.encode(text)
                    if found[: len(known)] == known:
                        return self._end + new, ids[:first] + found
        return None


def _text_from(tokenizer: Any, tokens: Sequence[int], start: int) -> str | None:
    """The text of tokens from one on, told by the few in front of it: None where these read otherwise without it."""
    behind = max(start - _BEHIND, 0)
    before, whole = _text(tokenizer, tokens[behind:start]), _text(tokenizer, tokens[behind:])
    return whole[len(before) :] if whole.startswith(before) else None


def _text(tokenizer: Any, tokens: Sequence[int]) -> str:
    return str(tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _by_text(tokenizer: Any, vocab_size: int) -> dict[str, int]:
    """Ids by what tokens look like, with one sign for a space in front."""
    return {token.replace("Ġ", "▁"): index for token, index in tokenizer.get_vocab().items() if index < vocab_size}
