"""Tokens that `no_repeat_ngram_size` and `bad_words` forbid, after the text of every node of a draft.

Committed tokens are indexed as they come. A node costs look-ups by the last tokens of its text and one comparison with
each of its ancestors, whatever the length of the text.

Tests: tests/sampling/test_banned_continuations.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor

_BITS = 32  # of a token in a packed suffix; the value 0 stands for a place before the text
_Suffix = int
"""The last tokens of a text as one integer, the newest in the lowest bits."""


def _mask(length: int) -> int:
    """A mask of the last `length` tokens of a suffix."""
    return (1 << _BITS * length) - 1


def _extend(suffix: _Suffix, token: int) -> _Suffix:
    return suffix << _BITS | token + 1


class BannedContinuations:
    """What `no_repeat_ngram_size` and `bad_words` forbid in one request, which follows its text.

    Args:
        ngram_size: Size of n-grams that may occur once. 0 is off. N-grams of the prompt count.
        words: Sequences of token ids. The last token is forbidden where the text, prompt included, ends with the
            others.
        tokens: Committed tokens, prompt first.

    Attributes:
        everywhere: Tokens that are forbidden after every node, int64 [K] on the CPU: words of one token, and committed
            tokens if n-grams have one token.
    """

    def __init__(self, ngram_size: int, words: Collection[Sequence[int]], tokens: Sequence[int]) -> None:
        self._size, self._of_ngram = ngram_size, _mask(max(ngram_size - 1, 0))
        self._followers: dict[_Suffix, list[int]] = {}  # suffix of n - 1 tokens -> tokens that followed it
        self._words: dict[int, dict[_Suffix, list[int]]] = {}  # mask of a suffix -> suffix -> last tokens of words
        self._seen: set[int] = set()
        self.everywhere = torch.tensor(sorted({word[0] for word in words if len(word) == 1}), dtype=torch.int64)
        longest = ngram_size - 1
        for *before, last in (word for word in words if len(word) > 1):
            suffix = 0
            for token in before:
                suffix = _extend(suffix, token)
            self._words.setdefault(_mask(len(before)), {}).setdefault(suffix, []).append(last)
            longest = max(longest, len(before))
        self._kept = _mask(max(longest, 0))
        self._suffix, self._length = 0, 0
        self.append(tokens)

    def append(self, tokens: Sequence[int]) -> None:
        """Consumes committed tokens."""
        if self._size == 1:
            new = {*tokens} - self._seen
            self._seen |= new
            self.everywhere = torch.cat((self.everywhere, torch.tensor(sorted(new), dtype=torch.int64)))
        suffix, kept, of_ngram, before = self._suffix, self._kept, self._of_ngram, self._size - 1
        length, followers = self._length, self._followers if self._size > 1 else None
        for token in tokens:
            if followers is not None and length >= before:
                followers.setdefault(suffix & of_ngram, []).append(token)
            suffix = _extend(suffix, token) & kept
            length += 1
        self._suffix, self._length = suffix, length

    def find(self, tokens: Sequence[int], parents: Sequence[int], wanted: Iterable[int]) -> list[list[int]]:
        """Finds the tokens that are forbidden after nodes of a tree, each after its own path, besides `everywhere`.

        Args:
            tokens: Token of each node, root first. The root is committed.
            parents: Parent of each node, -1 for the root. Parents precede children.
            wanted: The nodes to find tokens for.

        Returns:
            The tokens of each wanted node, in any order. A token may occur twice.
        """
        suffixes = [self._suffix]
        for node in range(1, len(tokens)):
            suffixes.append(_extend(suffixes[parents[node]], tokens[node]) & self._kept)
        grams = [suffix & self._of_ngram for suffix in suffixes] if self._size else []
        return [self._after(node, suffixes[node], grams, tokens, parents) for node in wanted]

    def _after(
        self, node: int, suffix: _Suffix, grams: list[_Suffix], tokens: Sequence[int], parents: Sequence[int]
    ) -> list[int]:
        """The forbidden tokens after one node."""
        found: list[int] = []
        if grams:
            own = grams[node]
            found += self._followers.get(own, ())
            while node > 0:  # n-grams that end on the path are not indexed
                token, node = tokens[node], parents[node]
                if grams[node] == own:
                    found.append(token)
        for mask, lasts in self._words.items():
            found += lasts.get(suffix & mask, ())
        return found


def forbid(logits: Tensor, rows: Sequence[int], tokens: Sequence[Sequence[int]], everywhere: Tensor) -> None:
    """Adds -inf to logits in place, so that NaN and +inf stay visible as NaN.

    Args:
        logits: Any float dtype, [R, V], of any row stride.
        rows: Rows of `logits`, all different.
        tokens: Token ids for each of these rows. Ids outside of the vocabulary are ignored.
        everywhere: Token ids for all of these rows, int64 [K] on the CPU.
    """
    (count, vocab), stride, device = logits.shape, logits.stride(0), logits.device
    starts = [row * stride for row in rows]
    own = [start + token for start, ids in zip(starts, tokens) for token in ids if token < vocab]
    if not own and not len(everywhere):
        return
    places = torch.tensor(own, dtype=torch.int64).to(device)
    if len(everywhere):
        shared = everywhere[everywhere < vocab].to(device)
        places = torch.cat((places, (torch.tensor(starts).to(device)[:, None] + shared).flatten()))
    # a sum over flat places is several times faster than indexing rows and columns
    flat = logits.as_strided(((count - 1) * stride + vocab,), (1,))
    flat.index_add_(0, places, logits.new_full((), -torch.inf).expand(len(places)))
