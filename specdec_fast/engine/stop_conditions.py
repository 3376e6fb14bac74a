"""Stop conditions: end-of-sequence ids, stop strings and lengths; and the text of a request as it grows.

Tests: tests/engine/test_stop_conditions.py.
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

    Attributes:
        text: The text so far.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int]) -> None:
        self.text = ""
        self._tokenizer = tokenizer
        # context, so that a word keeps its leading space
        self._tokens = list(prompt[-_CONTEXT - _MAX_CHARACTER_TOKENS + 1 :])
        self._start = 0
        self._shown = 0
        self._borders: tuple[int, ...] = ()  # numbers of tokens after which a character surely ends
        self._fresh = False
        self._prompt_text = None if tokenizer is None else self._context()

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
            self._tokens[start : len(self._tokens) - cut], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def _replace_incomplete(self, text: str) -> str:
        """Replaces an incomplete last character. Byte-fallback tokenizers alone would lose the whole run of bytes."""
        for cut in range(1, _MAX_CHARACTER_TOKENS):
            whole = self._decode(self._start, cut)
            if not whole.endswith(_INCOMPLETE):
                return text if text.startswith(whole) else whole + _INCOMPLETE
        return text

    def push(self, token: int) -> None:
        """Adds a token, without decoding it."""
        if self._tokenizer is not None:
            self._tokens.append(token)
            self._fresh = True

    def flush(self, final: bool = False) -> str:
        """Decodes the tokens since the last flush and adds them to the text.

        Args:
            final: No token will follow, so incomplete characters are decoded too.

        Returns:
            The new text; "" while a character is incomplete.
        """
        if not self._fresh:
            return ""
        text, start, shown = self._decode(self._start), self._start, self._shown
        if text.endswith(_INCOMPLETE):
            if not final:
                return ""
            text = self._replace_incomplete(text)
        if self._prompt_text is not None:  # a prompt may end inside a character that the new tokens complete
            shown = max(_common_length(each, text) for each in self._prompt_text)
        piece, shown, borders = text[shown:], len(text), (*self._borders, len(self._tokens))
        if len(self._tokens) - start > 3 * _CONTEXT:  # a short window keeps decoding cheap on long texts
            # it must not start inside a character, or a tokenizer may lose others beside it
            start = max((at for at in borders if at <= len(self._tokens) - _CONTEXT), default=start)
            shown, borders = len(self._decode(start)), tuple(at for at in borders if at > start)
        self._prompt_text, self._fresh = None, False
        self.text, self._start, self._shown, self._borders = self.text + piece, start, shown, borders
        return piece

    def snapshot(self) -> tuple[Any, ...]:
        """Returns the current state, for `restore`."""
        where = self._start, self._shown, self._borders
        return len(self._tokens), self.text, where, self._fresh, self._prompt_text

    def restore(self, snapshot: tuple[Any, ...]) -> None:
        """Returns to the state of a `snapshot`."""
        count, self.text, where, self._fresh, self._prompt_text = snapshot
        self._start, self._shown, self._borders = where
        del self._tokens[count:]


def _common_length(ours: str, theirs: str) -> int:
    """Length of the common prefix."""
    return next((at for at, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))


class StopChecker:
    """Decides after each token of a request whether the text ends there.

    Text is decoded when it is read. It is decoded after every token only if there are stop strings.

    Args:
        tokenizer: A transformers tokenizer, or None.
        prompt: Token ids of the prompt.
        eos_ids: Token ids that end the text.
        stop: Strings that end the text and are cut from it. Those that are complete within the first `min_new_tokens`
            tokens stay in the text.
        max_new_tokens: Most generated tokens.
        max_length: Most tokens of prompt and text together.
        min_new_tokens: Number of tokens before which stop strings do not count.
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
        min_new_tokens: int = 0,
    ) -> None:
        self._stream = TextStream(tokenizer, prompt)
        self._eos = frozenset(eos_ids)
        self._stop = tuple(stop)
        self._min_tokens, self._max_tokens = min_new_tokens, min(max_new_tokens, max_length - len(prompt))
        self._num_tokens = 0
        self._searched = 0  # length of the text that was searched for stop strings
        self._end: int | None = None  # start of the first stop string
        self._released = 0

    @property
    def text(self) -> str:
        """The text so far."""
        self._decode()
        return self._stream.text[: self._end]

    @property
    def released(self) -> int:
        """Length of the text that can no longer become part of a stop string."""
        self._decode()
        return self._released

    @property
    def remaining(self) -> int:
        """Tokens that may still be generated."""
        return self._max_tokens - self._num_tokens

    def push(self, token: int) -> str | None:
        """Adds one token. An interrupt (Ctrl-C) leaves the checker as it was.

        Args:
            token: Token id.

        Returns:
            Why the text ends with this token ("eos", "stop" or "length"), or None if it continues.
        """
        mark = self._num_tokens, self._searched, self._end, self._released, self._stream.snapshot()
        try:
            return self._add(token)
        except Exception:
            raise
        except BaseException:
            self._num_tokens, self._searched, self._end, self._released, stream = mark
            self._stream.restore(stream)
            raise

    def _add(self, token: int) -> str | None:
        """Adds one token, and returns why the text ends with it."""
        self._num_tokens += 1
        if token in self._eos:
            self._finish()
            return "eos"
        self._stream.push(token)
        if self._stop and self._decode():
            return "stop"
        if self.remaining <= 0:
            return "stop" if self._finish() else "length"
        return None

    def close(self) -> None:
        """Ends the text without another token, and releases the text that was held back."""
        self._finish()

    def _finish(self) -> bool:
        """Releases all text. Returns whether it has a stop string."""
        found = self._decode(final=True)
        self._released = len(self._stream.text) if self._end is None else self._end
        return found

    def _decode(self, final: bool = False) -> bool:
        """Decodes new tokens. Returns whether the text has a stop string."""
        self._stream.flush(final)
        text, searched = self._stream.text, self._searched
        if len(text) == searched or self._end is not None:
            return self._end is not None
        if self._num_tokens > self._min_tokens:
            starts = [(stop, max(0, searched - len(stop) + 1)) for stop in self._stop]
            found = [at for at in (text.find(stop, start) for stop, start in starts) if at >= 0]
            self._end = min(found, default=None)
        self._searched = len(text)
        self._released = max(self._released, len(text) - self._held_back(text)) if self._end is None else self._end
        return self._end is not None

    def _held_back(self, text: str) -> int:
        """Length of the longest suffix that is a prefix of a stop string."""
        longest = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:size]):
                    longest = size
                    break
        return longest
