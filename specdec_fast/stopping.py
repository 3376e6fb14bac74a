"""When a text ends: end-of-sequence ids, stop strings across token borders, lengths; and its text as it grows.

Tests: tests/test_stopping.py.
"""

from __future__ import annotations

from collections.abc import Sequence
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
        self._fresh = False
        self._prompt_text: str | None = None if tokenizer is None else self._decode()

    def _decode(self) -> str:
        text: str = self._tokenizer.decode(
            self._tokens[self._start :], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def push(self, token: int) -> None:
        """Take a token; nothing is decoded yet."""
        if self._tokenizer is not None:
            self._tokens.append(token)
            self._fresh = True

    def flush(self, final: bool = False) -> str:
        """The text that the tokens since the last flush complete ("" while a character is unfinished).

        final: nothing will follow, so give out what is held back.
        """
        if not self._fresh:
            return ""
        self._fresh = not final
        text = self._decode()
        if text.endswith(_INCOMPLETE) and not final:
            return ""
        if self._prompt_text is not None:  # a prompt may end inside a character that the new tokens complete
            self._shown = _common_length(self._prompt_text, text)
            self._prompt_text = None
        self._fresh = False
        piece, self._shown = text[self._shown :], len(text)
        if len(self._tokens) - self._start > 24:  # keep the window short: decoding stays cheap on long texts
            self._start = len(self._tokens) - 8
            self._shown = len(self._decode())
        return piece


def _common_length(ours: str, theirs: str) -> int:
    """Length of the common prefix."""
    return next((at for at, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))


class StopChecker:
    """Decides after each token of one request whether the text ends there.

    eos_ids: ids that end it; stop: strings that end it, cut from the text; max_new_tokens and max_length: hard limits.
    Text is decoded when somebody asks for it, and after every token only if there are stop strings to look for.
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
        self._text = ""
        self._released = 0

    @property
    def text(self) -> str:
        """All text so far."""
        self._decode()
        return self._text

    @property
    def released(self) -> int:
        """How much of the text can no longer become part of a stop string."""
        self._decode()
        return self._released

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
        self._stream.push(token)
        if self._stop and self._decode():
            return "stop"
        if self._left <= 0:
            return "stop" if self._finish() else "length"
        return None

    def close(self) -> None:
        """No more tokens will come (cancelled): release what was held back."""
        self._finish()

    def _finish(self) -> bool:
        """Release everything; True if a stop string was still found in it."""
        found = self._decode(final=True)
        self._released = len(self._text)
        return found

    def _decode(self, final: bool = False) -> bool:
        """Bring the text up to date; True if a stop string was found (and cut off)."""
        piece = self._stream.flush(final)
        if not piece:
            return False
        before = len(self._text)
        self._text += piece
        found = []
        if self._stop:
            start = max(0, before - max(map(len, self._stop)) + 1)
            found = [at for at in (self._text.find(stop, start) for stop in self._stop) if at >= 0]
        if found:
            self._text = self._text[: min(found)]
        self._released = len(self._text) if found else max(self._released, len(self._text) - self._held())
        return bool(found)

    def _held(self) -> int:
        """Length of the longest tail that is the beginning of a stop string."""
        longest = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(self._text)), longest, -1):
                if self._text.endswith(stop[:size]):
                    longest = size
                    break
        return longest
