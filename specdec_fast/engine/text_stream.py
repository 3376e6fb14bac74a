"""The text of a request as it grows: tokens are decoded piece by piece, and incomplete characters are held back.

Tests: tests/engine/test_text_stream.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_INCOMPLETE = "�"
_MAX_CHARACTER_TOKENS = 4
"""Most bytes of a character in UTF-8, and therefore most tokens of one."""
_CONTEXT = 8
"""Tokens of context with which new tokens are decoded."""


class TextStream:
    """Decodes tokens piece by piece, and holds back bytes that do not complete a character.

    Args:
        tokenizer: A transformers tokenizer. None makes no text.
        prompt: Token ids of the prompt, as context.
        skip_special_tokens: Whether the text lacks special tokens.

    Attributes:
        text: The text so far.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], skip_special_tokens: bool = True) -> None:
        self.text = ""
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        # context, so that a word keeps its leading space
        self._tokens = list(prompt[-_CONTEXT - _MAX_CHARACTER_TOKENS + 1 :])
        self._start = 0
        self._shown = 0
        self._borders: tuple[int, ...] = ()  # numbers of tokens after which a character surely ends
        self._decoded = len(self._tokens)
        self._fresh = False
        self._prompt_text = None if tokenizer is None else self._context()

    @property
    def is_complete(self) -> bool:
        """Whether the text has all tokens, so that none waits for the rest of its character."""
        return not self._fresh

    def _context(self) -> tuple[str, str]:
        """Starts at a whole character of the prompt. Returns the text from there, and up to its last whole one."""
        count = len(self._tokens)
        starts = [max(0, count - _CONTEXT - more) for more in range(_MAX_CHARACTER_TOKENS)]
        for cut in range(min(_MAX_CHARACTER_TOKENS, count)):
            for start in starts:
                text = self._decode(start, cut)
                if not (text.startswith(_INCOMPLETE) or text.endswith(_INCOMPLETE)):
                    self._start = start
                    return self._decode(start) if cut else text, text
        self._start = starts[0]
        texts = [self._decode(starts[0], cut) for cut in range(min(_MAX_CHARACTER_TOKENS, count))] or [""]
        return texts[0], next((text for text in texts if not text.endswith(_INCOMPLETE)), texts[0])

    def _decode(self, start: int, cut: int = 0) -> str:
        """Decodes the tokens from `start`, without the last `cut`."""
        text: str = self._tokenizer.decode(
            self._tokens[start : len(self._tokens) - cut],
            skip_special_tokens=self._skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
        return text

    def _replace_incomplete(self, text: str) -> str:
        """Replaces an incomplete last character. Byte-fallback tokenizers alone would lose the whole run of bytes."""
        for cut in range(1, _MAX_CHARACTER_TOKENS):
            whole = self._decode(self._start, cut)
            if not whole.endswith(_INCOMPLETE):
                return text if text.startswith(whole) else whole + _INCOMPLETE
        return text

    def _cut_incomplete(self) -> tuple[int, str]:
        """Returns how many last tokens to leave out for whole characters, and the text then: 0 and "" for none."""
        for cut in range(1, min(_MAX_CHARACTER_TOKENS, len(self._tokens) - self._decoded)):
            text = self._decode(self._start, cut)
            if not text.endswith(_INCOMPLETE):
                return cut, text
        return 0, ""

    def push(self, token: int) -> None:
        """Adds a token, without decoding it."""
        if self._tokenizer is not None:
            self._tokens.append(token)
            self._fresh = True

    def flush(self, final: bool = False) -> str:
        """Decodes the tokens since the last flush and adds their whole characters to the text.

        Args:
            final: No token will follow, so incomplete characters are decoded too.

        Returns:
            The new text. An incomplete last character waits for its other tokens.
        """
        if not self._fresh:
            return ""
        cut, text, start, shown = 0, self._decode(self._start), self._start, self._shown
        if text.endswith(_INCOMPLETE) and final:
            text = self._replace_incomplete(text)
        elif text.endswith(_INCOMPLETE):
            cut, text = self._cut_incomplete()
            if not cut:
                return ""
        if self._prompt_text is not None:  # a prompt may end inside a character that the new tokens complete
            shown = max(common_length(each, text) for each in self._prompt_text)
        count = len(self._tokens) - cut
        piece, shown, borders = text[shown:], len(text), (*self._borders, count)
        if count - start > 3 * _CONTEXT:  # a short window keeps decoding cheap on long texts
            # it must not start inside a character, or a tokenizer may lose others beside it
            start = max((at for at in borders if at <= count - _CONTEXT), default=start)
            shown, borders = len(self._decode(start, cut)), tuple(at for at in borders if at > start)
        self._prompt_text, self._fresh, self._decoded = None, cut > 0, count
        self.text, self._start, self._shown, self._borders = self.text + piece, start, shown, borders
        return piece

    def snapshot(self) -> tuple[Any, ...]:
        """Returns the current state, for `restore`."""
        where = self._start, self._shown, self._borders, self._decoded
        return len(self._tokens), self.text, where, self._fresh, self._prompt_text

    def restore(self, snapshot: tuple[Any, ...]) -> None:
        """Returns to the state of a `snapshot`."""
        count, self.text, where, self._fresh, self._prompt_text = snapshot
        self._start, self._shown, self._borders, self._decoded = where
        del self._tokens[count:]


def common_length(ours: str, theirs: str) -> int:
    """Returns the length of the common prefix of two texts."""
    return next((at for at, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))
