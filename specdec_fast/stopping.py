"""When a text ends: end-of-sequence ids, stop strings across token borders, lengths; and its text as it grows.

Tests: tests/test_stopping.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from os.path import commonprefix
from typing import Any

_INCOMPLETE = "�"


class TextStream:
    """Turns tokens into text piece by piece, holding back bytes that do not yet make a character.

    tokenizer: a transformers tokenizer, or None (no text is made).
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._tokens = list(prompt[-8:])  # context, so that a word keeps its leading space
        self._start = 0
        self._shown = 0
        self._prompt_text: str | None = None if tokenizer is None else self._decode()

    def _decode(self) -> str:
        text: str = self._tokenizer.decode(
            self._tokens[self._start :], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def push(self, token: int, final: bool = False) -> str:
        """The text that this token completes ("" while a character is unfinished)."""
        if self._tokenizer is None:
            return ""
        self._tokens.append(token)
        return self._flush(final)

    def finish(self) -> str:
        """Whatever is still held back."""
        return "" if self._tokenizer is None else self._flush(final=True)

    def _flush(self, final: bool) -> str:
        text = self._decode()
        if text.endswith(_INCOMPLETE) and not final:
            return ""
        if self._prompt_text is not None:  # a prompt may end inside a character that the new tokens complete
            self._shown = len(commonprefix([self._prompt_text, text]))
            self._prompt_text = None
        piece, self._shown = text[self._shown :], len(text)
        if len(self._tokens) - self._start > 64:  # keep the window short: decoding stays cheap on long texts
            self._start = len(self._tokens) - 8
            self._shown = len(self._decode())
        return piece


class StopChecker:
    """Decides after each token of one request whether the text ends there.

    eos_ids: ids that end it; stop: strings that end it, cut from the text; max_new_tokens and max_length: hard limits.
    Holds `text` (all of it) and `released` (how much of it can no longer become part of a stop string).
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt: Sequence[int],
        *,
        eos_ids: Sequence[int],
        stop: Sequence[str],
        max_new_tokens: int,
        max_length: int,
    ) -> None:
        self._stream = TextStream(tokenizer, prompt)
        self._eos = frozenset(eos_ids)
        self._stop = tuple(stop)
        self._left = min(max_new_tokens, max_length - len(prompt))
        self.text = ""
        self.released = 0

    @property
    def remaining(self) -> int:
        """Tokens that may still be produced."""
        return self._left

    def push(self, token: int) -> str | None:
        """Take one token; the reason the text ends with it ("eos", "stop", "length"), or None."""
        self._left -= 1
        if token in self._eos:
            self._finish()
            return "eos"
        before = len(self.text)
        self.text += self._stream.push(token)
        if self._stop and len(self.text) > before and self._find_stop(before):
            return "stop"
        if self._left <= 0:
            self._finish()
            return "stop" if self._stop and self._find_stop(before) else "length"
        self.released = max(self.released, len(self.text) - self._held())
        return None

    def close(self) -> None:
        """No more tokens will come (cancelled): release what was held back."""
        self._finish()

    def _finish(self) -> None:
        self.text += self._stream.finish()
        self.released = len(self.text)

    def _find_stop(self, before: int) -> bool:
        start = max(0, before - max(map(len, self._stop)) + 1)
        found = [at for at in (self.text.find(stop, start) for stop in self._stop) if at >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.released = len(self.text)
        return bool(found)

    def _held(self) -> int:
        """Length of the longest tail that is the beginning of a stop string."""
        longest = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(self.text)), longest, -1):
                if self.text.endswith(stop[:size]):
                    longest = size
                    break
        return longest
