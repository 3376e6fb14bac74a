"""Special tokens in stop strings: the tokens that strings name, and the text that has special tokens.

Tests: tests/engine/test_stop_conditions.py, tests/engine/test_stop_oracle.py.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Any

from specdec_fast.engine.text_stream import TextStream, common_length


def find_special_tokens(tokenizer: Any, strings: Iterable[str]) -> tuple[frozenset[int], tuple[str, ...]]:
    """Finds the special tokens of a tokenizer in stop strings.

    Args:
        tokenizer: A transformers tokenizer, or None.
        strings: Stop strings.

    Returns:
        The ids of special tokens whose name is a whole stop string, and the other strings that have a special token in
        them. Text without special tokens has none of either.
    """
    whole: set[int] = set()
    mixed: list[str] = []
    for string in strings:
        ids = [token for token in _encode(tokenizer, string) if _is_hidden(tokenizer, token)]
        if len(ids) == 1 and tokenizer.convert_ids_to_tokens(ids[0]) == string:
            whole.add(ids[0])
        elif ids:
            mixed.append(string)
    return frozenset(whole), tuple(mixed)


def _encode(tokenizer: Any, string: str) -> list[int]:
    """Returns the tokens of a string, in which special tokens are recognised; none if it cannot be encoded."""
    encode = getattr(tokenizer, "encode", None)
    if encode is None:
        return []
    try:
        return list(encode(string, add_special_tokens=False))
    except Exception:  # text that no token can be part of, such as a lone surrogate
        return []


def _is_hidden(tokenizer: Any, token: int) -> bool:
    """Whether text without special tokens lacks a token."""
    without = tokenizer.decode([token], skip_special_tokens=True)
    return not without and bool(tokenizer.decode([token], skip_special_tokens=False))


class FullText:
    """The text with special tokens, beside the shown text, which lacks them.

    Args:
        tokenizer: A transformers tokenizer.
        prompt: Token ids of the prompt, as context.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int]) -> None:
        self._stream = TextStream(tokenizer, prompt, skip_special_tokens=False)
        self._borders = [(0, 0)]  # lengths of this text and of the shown one after tokens that both have completely

    @property
    def text(self) -> str:
        """The text so far."""
        return self._stream.text

    def push(self, token: int) -> None:
        """Adds a token, without decoding it."""
        self._stream.push(token)

    def flush(self, shown: TextStream, final: bool = False) -> str:
        """Decodes new tokens, after they were pushed to the shown text and it was flushed.

        Args:
            shown: The shown text.
            final: No token will follow.

        Returns:
            The new text.
        """
        piece = self._stream.flush(final)
        if piece and shown.is_complete:
            self._borders.append((len(self.text), len(shown.text)))
        return piece

    def shown_length(self, length: int, shown: str) -> int:
        """Returns how many characters of the shown text come from the first characters of this text.

        Args:
            length: Number of characters of this text.
            shown: The shown text.
        """
        at = bisect_right(self._borders, length, key=itemgetter(0)) - 1
        last = len(self.text), len(shown)
        (start, shown_start), (end, shown_end) = [*self._borders[at : at + 2], last][:2]
        same = common_length(shown[shown_start:shown_end], self.text[start:end])
        return shown_start + min(length - start, same)

    def snapshot(self) -> tuple[Any, ...]:
        """Returns the current state, for `restore`."""
        return self._stream.snapshot(), len(self._borders)

    def restore(self, snapshot: tuple[Any, ...]) -> None:
        """Returns to the state of a `snapshot`."""
        stream, count = snapshot
        self._stream.restore(stream)
        del self._borders[count:]
