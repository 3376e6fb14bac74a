"""Where tokens begin in a text, as the field text_offset of completions says.

Tests: tests/server/test_text_offsets.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specdec_fast.engine.text_stream import TextStream
from specdec_fast.sampling.logprobs import TokenLogprob
from specdec_fast.server.responses import make_decode

Scored = tuple[int, TokenLogprob | None, int]
"""A token, its log-probability, and the character of the text with which it begins."""

_INCOMPLETE = "�"


class TextOffsets:
    """Counts the characters of a text before each of its tokens.

    Tokens of one character share its offset. Special tokens that the text lacks have the offset of what follows.

    Args:
        tokenizer: A transformers tokenizer.
        context: Token ids before the first one.
        skip_special_tokens: Whether the text lacks special tokens.
        start: Offset of the first token.
    """

    def __init__(self, tokenizer: Any, context: Sequence[int], skip_special_tokens: bool, start: int = 0) -> None:
        self._stream, self._start = TextStream(tokenizer, context, skip_special_tokens), start
        self._decode = make_decode(tokenizer)

    def add(self, token: int) -> int:
        """Adds a token, and returns the offset of its beginning."""
        at, waits = len(self._stream.text), not self._stream.is_complete
        self._stream.push(token)
        new = self._stream.flush()
        if waits and new:  # bytes before this token turned out to be no whole character
            own = self._decode(token)
            if new.endswith(own) and _INCOMPLETE not in own:
                at += len(new) - len(own)
        return self._start + at


def split_released(waiting: list[Scored], length: int, ended: bool) -> tuple[list[Scored], list[Scored]]:
    """Splits tokens into those that a client gets, and those whose text is held back.

    Text that may become a stop string is held back, and may be cut off.

    Args:
        waiting: Tokens that the client has not got, in their order.
        length: Characters of the text that the client has.
        ended: Whether the text has ended, so that no token waits any longer.

    Returns:
        Both parts. No offset of the first one is beyond the text.
    """
    if ended:
        return [(token, score, min(at, length)) for token, score, at in waiting], []
    count = sum(at <= length for _, _, at in waiting)  # offsets do not fall
    return waiting[:count], waiting[count:]
