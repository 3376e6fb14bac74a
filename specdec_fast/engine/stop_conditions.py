"""When a text ends: end-of-sequence ids, stop strings across token borders, lengths; and its text as it grows.

Tests: tests/engine/test_stop_conditions.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_INCOMPLETE = "�"
_LONGEST = 4
"""Bytes of a character, and so tokens of one, at most."""
_CONTEXT = 8
"""Tokens that what follows is decoded with."""


class TextStream:
    """Turns tokens into text piece by piece, holding back bytes that do not yet make a character.

    tokenizer: a transformers tokenizer, or None (no text is made). text: what the tokens were made into so far.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int]) -> None:
        self.text = ""
        self._tokenizer = tokenizer
        self._tokens = list(prompt[-_CONTEXT - _LONGEST + 1 :])  # context, so that a word keeps its leading space
        self._start = 0
        self._shown = 0
        self._borders: tuple[int, ...] = ()  # numbers of tokens behind which a character surely ends
        self._fresh = False
        self._prompt_text = None if tokenizer is None else self._context()

    def _context(self) -> tuple[str, str]:
        """Begin in the prompt, with a whole character: the text from there, and as far as its last whole character."""
        count = len(self._tokens)
        starts = [max(0, count - _CONTEXT - more) for more in range(_LONGEST)]
        for cut in range(min(_LONGEST, count)):
            for start in starts:
                text = self._decode(start, cut)
                if not (text.startswith(_INCOMPLETE) or text.endswith(_INCOMPLETE)):
                    self._start = start
                    return self._decode(start) if cut else text, text
        self._start = starts[0]
        texts = [self._decode(starts[0], cut) for cut in range(min(_LONGEST, count))] or [""]
        return texts[0], next((text for text in texts if not text.endswith(_INCOMPLETE)), texts[0])

    def _decode(self, start: int, cut: int = 0) -> str:
        text: str = self._tokenizer.decode(
            self._tokens[start : len(self._tokens) - cut], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def _cut_off(self, text: str) -> str:
        """A text that ends inside a character, which alone is lost: tokenizers that fall back on bytes lose the whole
        run of bytes.
        """
        for cut in range(1, _LONGEST):
            whole = self._decode(self._start, cut)
            if not whole.endswith(_INCOMPLETE):
                return text if text.startswith(whole) else whole + _INCOMPLETE
        return text

    def push(self, token: int) -> None:
        """Take a token; nothing is decoded yet."""
        if self._tokenizer is not None:
            self._tokens.append(token)
            self._fresh = True

    def flush(self, final: bool = False) -> str:
        """Add to the text what the tokens since the last flush complete, and return it: "" while a character is
        unfinished.

        final: nothing will follow, so give out what is held back.
        """
        if not self._fresh:
            return ""
        text, start, shown = self._decode(self._start), self._start, self._shown
        if text.endswith(_INCOMPLETE):
            if not final:
                return ""
            text = self._cut_off(text)
        if self._prompt_text is not None:  # a prompt may end inside a character that the new tokens complete
            shown = max(_common_length(each, text) for each in self._prompt_text)
        piece, shown, borders = text[shown:], len(text), (*self._borders, len(self._tokens))
        if len(self._tokens) - start > 3 * _CONTEXT:  # keep the window short: decoding stays cheap on long texts
            # not inside a character: a tokenizer may then lose others beside it
            start = max((at for at in borders if at <= len(self._tokens) - _CONTEXT), default=start)
            shown, borders = len(self._decode(start)), tuple(at for at in borders if at > start)
        self._prompt_text, self._fresh = None, False
        self.text, self._start, self._shown, self._borders = self.text + piece, start, shown, borders
        return piece

    def mark(self) -> tuple[Any, ...]:
        """Where it is now, for `back_to`."""
        where = self._start, self._shown, self._borders
        return len(self._tokens), self.text, where, self._fresh, self._prompt_text

    def back_to(self, mark: tuple[Any, ...]) -> None:
        """Forget what was taken since."""
        count, self.text, where, self._fresh, self._prompt_text = mark
        self._start, self._shown, self._borders = where
        del self._tokens[count:]


def _common_length(ours: str, theirs: str) -> int:
    """Length of the common prefix."""
    return next((at for at, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))


class StopChecker:
    """Decides after each token of one request whether the text ends there.

    eos_ids: ids that end it; stop: strings that end it, cut from the text, unless they are complete within the first
    min_new_tokens tokens: there they are text; max_new_tokens and max_length: hard limits.
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
        min_new_tokens: int = 0,
    ) -> None:
        self._stream = TextStream(tokenizer, prompt)
        self._eos = frozenset(eos_ids)
        self._stop = tuple(stop)
        self._least, self._most = min_new_tokens, min(max_new_tokens, max_length - len(prompt))
        self._given = 0
        self._looked = 0  # how much of the text was looked through for stop strings
        self._end: int | None = None  # where the first of them begins
        self._released = 0

    @property
    def text(self) -> str:
        """All text so far."""
        self._decode()
        return self._stream.text[: self._end]

    @property
    def released(self) -> int:
        """How much of the text can no longer become part of a stop string."""
        self._decode()
        return self._released

    @property
    def remaining(self) -> int:
        """Tokens that may still be produced."""
        return self._most - self._given

    def push(self, token: int) -> str | None:
        """Take one token; the reason the text ends with it ("eos", "stop", "length"), or None.

        Interrupted (Ctrl-C) it is as if the token had not been given.
        """
        mark = self._given, self._looked, self._end, self._released, self._stream.mark()
        try:
            return self._take(token)
        except Exception:
            raise
        except BaseException:
            self._given, self._looked, self._end, self._released, stream = mark
            self._stream.back_to(stream)
            raise

    def _take(self, token: int) -> str | None:
        self._given += 1
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
        """No more tokens will come (cancelled): release what was held back."""
        self._finish()

    def _finish(self) -> bool:
        """Release everything; True if a stop string was found in it."""
        found = self._decode(final=True)
        self._released = len(self._stream.text) if self._end is None else self._end
        return found

    def _decode(self, final: bool = False) -> bool:
        """Bring the text up to date; True if it has a stop string, which ends it."""
        self._stream.flush(final)
        text, looked = self._stream.text, self._looked
        if len(text) == looked or self._end is not None:
            return self._end is not None
        if self._given > self._least:
            starts = [(stop, max(0, looked - len(stop) + 1)) for stop in self._stop]
            found = [at for at in (text.find(stop, start) for stop, start in starts) if at >= 0]
            self._end = min(found, default=None)
        self._looked = len(text)
        self._released = max(self._released, len(text) - self._held(text)) if self._end is None else self._end
        return self._end is not None

    def _held(self, text: str) -> int:
        """Length of the longest tail that is the beginning of a stop string."""
        longest = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:size]):
                    longest = size
                    break
        return longest
