"""Stop conditions: end-of-sequence ids, stop strings and lengths.

Tests: tests/engine/test_stop_conditions.py, tests/engine/test_stop_oracle.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specdec_fast.engine.special_tokens import FullText, find_special_tokens
from specdec_fast.engine.text_stream import TextStream


def check_eos_ids(ids: int | Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """Returns end-of-sequence ids as a tuple. Raises ValueError for an id outside of the vocabulary."""
    found = (ids,) if isinstance(ids, int) else tuple(ids)
    if any(type(each) is bool or not hasattr(each, "__index__") or not 0 <= each < vocab_size for each in found):
        raise ValueError(f"eos_token_ids: got {found}; expected ids of the target's vocabulary, 0..{vocab_size - 1}")
    return found


class _Search:
    """Finds stop strings in a text that grows.

    Args:
        strings: The stop strings.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self.searched = 0  # length of the text in which no string counts any more

    def find(self, text: str) -> tuple[int, int] | None:
        """Returns end and start of the string that is complete first, the longest of several; None without one."""
        starts = [(each, max(0, self.searched - len(each) + 1)) for each in self._strings]
        found = [(at, len(each)) for each, start in starts if (at := text.find(each, start)) >= 0]
        return min(((at + length, at) for at, length in found), default=None)

    def held_back(self, text: str) -> int:
        """Returns the length of the longest suffix that is a prefix of a stop string."""
        longest = 0
        for stop in self._strings:
            for size in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:size]):
                    longest = size
                    break
        return longest


class StopChecker:
    """Decides after each token of a request whether the text ends there.

    Text is decoded when it is read. It is decoded after every token only if there are stop strings. Of several stop
    strings the one that is complete first ends the text, whatever the tokens in which it came.

    Args:
        tokenizer: A transformers tokenizer, or None.
        prompt: Token ids of the prompt.
        eos_ids: Token ids that end the text.
        stop: Strings that end the text. Those that are complete within the first `min_new_tokens` tokens stay in the
            text. They are searched in the text, and those with special tokens also in the text with special tokens. The
            name of a special token stands for the token.
        max_new_tokens: Most generated tokens.
        max_length: Most tokens of prompt and text together.
        min_new_tokens: Number of tokens before which stop strings do not count.
        skip_special_tokens: Whether the text lacks special tokens.
        include_stop: Whether the text ends with what ended it: the stop string, or the end-of-sequence token.
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
        skip_special_tokens: bool = True,
        include_stop: bool = False,
    ) -> None:
        self._stream = TextStream(tokenizer, prompt, skip_special_tokens)
        self._eos = frozenset(eos_ids)
        self._search, self._include = _Search(stop), include_stop
        self._stop_ids, mixed = find_special_tokens(tokenizer, stop)
        has_full = bool(mixed) and skip_special_tokens
        self._full = FullText(tokenizer, prompt) if has_full else None
        self._full_search = _Search(mixed if has_full else ())
        self._decodes_always = bool(stop)
        self._min_tokens, self._max_tokens = min_new_tokens, min(max_new_tokens, max_length - len(prompt))
        self._num_tokens = 0
        self._end: int | None = None  # end of the text
        self._released = 0

    @property
    def text(self) -> str:
        """The text so far."""
        self._decode()
        return self._stream.text[: self._end]

    @property
    def released(self) -> int:
        """Length of the text that can no longer change."""
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
        mark = self._num_tokens, self._end, self._released, self._search.searched, self._full_search.searched
        stream, full = self._stream.snapshot(), () if self._full is None else self._full.snapshot()
        try:
            return self._add(token)
        except Exception:
            raise
        except BaseException:
            self._num_tokens, self._end, self._released, self._search.searched, self._full_search.searched = mark
            self._stream.restore(stream)
            if self._full is not None:
                self._full.restore(full)
            raise

    def _add(self, token: int) -> str | None:
        """Adds one token, and returns why the text ends with it."""
        self._num_tokens += 1
        if token in self._eos:
            self._end_at(token)
            return "eos"
        if token in self._stop_ids and self._num_tokens > self._min_tokens:
            self._end_at(token)
            return "stop"
        self._push(token)
        if self._decodes_always and self._decode():
            return "stop"
        if self.remaining <= 0:
            return "stop" if self._finish() else "length"
        return None

    def close(self) -> None:
        """Ends the text without another token, and releases the text that was held back."""
        self._finish()

    def _push(self, token: int) -> None:
        self._stream.push(token)
        if self._full is not None:
            self._full.push(token)

    def _end_at(self, token: int) -> None:
        """Ends the text with a token that ends it. The token may also complete a stop string."""
        if not self._decode(final=True):
            end = len(self._stream.text)
            if self._include or self._decodes_always:
                self._push(token)
                self._decode(final=True)
            if self._end is None and not self._include:
                self._end = end
        self._finish()

    def _finish(self) -> bool:
        """Releases all text. Returns whether it has a stop string."""
        found = self._decode(final=True)
        self._released = len(self._stream.text) if self._end is None else self._end
        return found

    def _decode(self, final: bool = False) -> bool:
        """Decodes new tokens. Returns whether the text has ended before their end."""
        if self._end is not None:
            return True
        grown = self._stream.flush(final)
        if self._full is not None:
            grown += self._full.flush(self._stream, final)
        if not grown:
            return False
        found = self._find() if self._num_tokens > self._min_tokens else None
        text = self._stream.text
        self._search.searched = len(text)
        if self._full is not None:
            self._full_search.searched = len(self._full.text)
        if found is not None:  # text that was released stays, however a tokenizer decodes
            self._end = self._released = max(self._released, found[0] if self._include else found[1])
        elif self._include:  # the text is never cut before its present end
            self._released = len(text)
        else:
            self._released = max(self._released, self._final_length(text))
        return self._end is not None

    def _find(self) -> tuple[int, int] | None:
        """Finds the first complete stop string. Returns its end and its start in the text."""
        found = [self._search.find(self._stream.text)]
        hidden = None if self._full is None else self._full_search.find(self._full.text)
        if hidden is not None:
            assert self._full is not None
            self._stream.flush(final=True)  # no token follows
            end, start = (self._full.shown_length(at, self._stream.text) for at in hidden)
            found.append((end, start))
        return min((each for each in found if each is not None), default=None)

    def _final_length(self, text: str) -> int:
        """Returns the length of the text that cannot become part of a stop string."""
        length = len(text) - self._search.held_back(text)
        if self._full is None:
            return length
        full = self._full.text
        return min(length, self._full.shown_length(len(full) - self._full_search.held_back(full), text))
