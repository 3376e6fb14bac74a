"""Grammars: the interface of matchers, and the masks of a token tree.

Knows no grammar library; `specdec_fast/integrations/llguidance.py` adapts one. Tests: tests/sampling/test_grammar.py.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class Matcher(Protocol):
    """A grammar at one position of a text.

    The generated text must match the grammar; the prompt is not checked. A matcher knows nothing of ids that end a
    text: they are allowed exactly where `complete` is true.
    """

    @property
    def vocab_size(self) -> int:
        """Number of token ids that the matcher knows. Later ids are forbidden."""
        ...

    @property
    def complete(self) -> bool:
        """Whether the text so far matches the whole grammar, so that it may end here."""
        ...

    def fork(self) -> Matcher:
        """Returns an independent matcher at the same position."""
        ...

    def advance(self, token: int) -> bool:
        """Consumes one token. Returns False, without any change, if the grammar forbids it."""
        ...

    def rollback(self, count: int) -> None:
        """Undoes the last `count` calls of `advance`."""
        ...

    def fill_mask(self, words: Tensor) -> None:
        """Overwrites a mask of the tokens that may follow.

        Args:
            words: int32 [ceil(vocab_size / 32)] on the CPU. Bit v % 32 of word v // 32 is set if token v may follow.
        """
        ...


def pack_token_ids(ids: Collection[int], width: int) -> Tensor:
    """Packs token ids into a bit mask.

    Args:
        ids: Token ids. Those of 32 * width and more are ignored.
        width: Number of words.

    Returns:
        int32 [width]; bit v % 32 of word v // 32 is set for each id v.
    """
    known = torch.tensor(sorted({token for token in ids if token < 32 * width}), dtype=torch.int64)
    bits = torch.zeros(width, dtype=torch.int64).index_add_(0, known // 32, 1 << known % 32)
    return torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32)


class GrammarState:
    """The grammar of one request, which follows its text.

    Args:
        matcher: A grammar in its initial state. It is forked and never changed.
        ends: Token ids that end the text.
        generated: Tokens that were generated already.

    Attributes:
        error: The exception that the matcher raised, or None. After one on committed tokens the grammar allows nothing
            any more. One on draft tokens holds until the next `fill_masks`.
    """

    def __init__(self, matcher: Matcher, ends: Sequence[int], generated: Sequence[int] = ()) -> None:
        self.error: Exception | None = None
        self._start = matcher
        self._ends = frozenset(ends)
        self._end_words: dict[int, Tensor] = {}
        self._text: list[int] = []
        self._broken = False
        self._renew()
        self.advance(generated)

    @property
    def width(self) -> int:
        """Words of its masks: enough for the matcher's ids and for the ids that end the text."""
        return max(-(-self._start.vocab_size // 32), max(self._ends, default=0) // 32 + 1)

    def advance(self, tokens: Sequence[int]) -> None:
        """Consumes committed tokens."""
        try:
            for token in tokens:
                if self._broken or token in self._ends:
                    return
                self._text.append(token)
                self._enter(token)
        except Exception as error:
            self.error, self._broken = error, True

    def fill_masks(
        self, tokens: Sequence[int], parents: Sequence[int], words: Tensor, wanted: Collection[int] | None = None
    ) -> list[bool]:
        """Computes the masks of the nodes of a tree, each after its own path.

        Args:
            tokens: Token of each of the n nodes, root first. The root is committed.
            parents: Parent of each node, -1 for the root. Parents precede children.
            words: int32 [n, W] on the CPU, with W at least `width`, that is overwritten with the masks.
            wanted: Nodes whose masks are needed. None for all.

        Returns:
            Whether each node can be reached. The others are below a token that the grammar forbids or that ends the
            text, and have no mask. A node at which the matcher raises allows nothing; if it is the root, no node does.
        """
        words.zero_()
        if not tokens:  # the tree of this request is complete, while others of the batch still grow
            return []
        failed: set[int] = set()
        if not self._broken:
            self.error = None
        while not self._broken:
            reached = [node in failed for node in range(len(tokens))]
            at = self._walk(tokens, parents, words, wanted, failed, reached)
            if at is None:
                return reached
            words[at] = 0
            failed.add(at)
            self._broken = at == 0 or not self._renew()
        words.zero_()
        return [True] * len(tokens)

    def can_start(self) -> bool:
        """Returns whether any token may follow the text so far.

        Raises:
            Exception: Whatever the matcher raised.
        """
        words = torch.zeros(1, self.width, dtype=torch.int32)
        self.fill_masks([0], [-1], words)
        if self.error is not None:
            raise self.error
        return bool((words != 0).any())

    def _renew(self) -> bool:
        """Replaces the matcher by a fresh one after the committed text, since one that raised may be in any state."""
        try:
            self._matcher = self._start.fork()
            for token in self._text:
                self._enter(token)
        except Exception as error:
            self.error, self._broken = error, True
        return not self._broken

    def _enter(self, token: int) -> None:
        """Consumes one committed token."""
        if not self._matcher.advance(token):
            raise ValueError(f"the matcher allowed token {token} and then refused it")

    def _walk(
        self,
        tokens: Sequence[int],
        parents: Sequence[int],
        words: Tensor,
        wanted: Collection[int] | None,
        failed: set[int],
        reached: list[bool],
    ) -> int | None:
        """Visits all nodes but those below `failed` ones. Returns the node at which the matcher raised, or None."""
        children: list[list[int]] = [[] for _ in tokens]
        for node, parent in enumerate(parents):
            if parent >= 0 and node not in failed:
                children[parent].append(node)
        todo = [0]  # ~node stands for the return from a node
        node = 0
        try:
            while todo:
                node = todo.pop()
                if node < 0:
                    self._matcher.rollback(1)
                    continue
                if node > 0:
                    token = tokens[node]
                    if token in self._ends:
                        continue
                    if not self._matcher.advance(token):
                        if _has_bit(words[parents[node]], token):
                            raise ValueError(f"the matcher allowed token {token} and then refused it")
                        continue
                    todo.append(~node)
                reached[node] = True
                if wanted is None or node in wanted:
                    self._mask(words[node])
                todo.extend(reversed(children[node]))
        except Exception as error:
            self.error = error
            return node if node >= 0 else ~node
        except BaseException:  # Ctrl-C may leave the matcher at any node
            self._renew()
            raise
        return None

    def _mask(self, words: Tensor) -> None:
        """Writes the mask at the matcher's position, with the ids that end the text."""
        width = words.shape[0]
        ends = self._end_words.get(width)
        if ends is None:
            ends = self._end_words[width] = pack_token_ids(self._ends, width)
        words.zero_()
        self._matcher.fill_mask(words[: -(-self._matcher.vocab_size // 32)])
        words &= ~ends
        if self._matcher.complete:
            words |= ends


def _has_bit(words: Tensor, token: int) -> bool:
    """Whether a mask allows a token."""
    return bool(0 <= token < 32 * words.shape[0] and int(words[token // 32]) >> token % 32 & 1)
