"""Names of pages: what decides whether two texts can share a page of the cache.

Tests: tests/cache/test_prefix.py.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from hashlib import blake2b

_KEY = os.urandom(16)  # the digests of this process cannot be foreseen, so nobody can prepare a collision
_SIZE = 16


class PageNames:
    """Names of the pages that a growing text fills.

    Keys and values of a token depend on all tokens before it. The name of a page is therefore a digest of its tokens
    and of the name of the page before it. Equal names mean equal prefixes, up to collisions of 128-bit keyed digests.

    Args:
        page_size: Tokens per page.
        salt: Texts with different salts never have equal names.
        kind: Nor have texts of different kinds, whose keys are computed in different ways.

    Attributes:
        salt: The salt.
    """

    __slots__ = ("_names", "_page_size", "_start", "salt")

    def __init__(self, page_size: int, salt: str = "", kind: str = "") -> None:
        self.salt = salt
        self._page_size = page_size
        fields = [text.encode("utf-8", "surrogatepass") for text in (kind, salt)]
        start = len(fields[0]).to_bytes(8, "little") + b"".join(fields)  # a salt may contain anything
        self._start = blake2b(start, key=_KEY, digest_size=_SIZE).digest()
        self._names: list[bytes] = []

    def upto(self, tokens: Sequence[int], length: int) -> list[bytes]:
        """Returns the names of the pages that the first tokens of the text fill, without the last, partial page.

        Args:
            tokens: The text. It must begin with the tokens of all calls before.
            length: Number of first tokens to name.
        """
        size, count, known = self._page_size, length // self._page_size, len(self._names)
        if count > known:
            packed = memoryview(array("q", tokens[known * size : count * size])).cast("B")
            width = 8 * size
            last = self._names[-1] if self._names else self._start
            for start in range(0, len(packed), width):
                digest = blake2b(last, key=_KEY, digest_size=_SIZE)
                digest.update(packed[start : start + width])
                last = digest.digest()
                self._names.append(last)
        return self._names[:count]
