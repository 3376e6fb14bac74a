"""Grammars: the protocol of a matcher that says which tokens may follow, and how a tree of tokens is walked with one.

Knows no grammar library; `specdec_fast/integrations/llguidance.py` adapts one. Tests: tests/sampling/test_grammar.py.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class Matcher(Protocol):
    """A grammar at one place of a text. The generated text must match it; the prompt is not looked at.

    vocab_size: tokens that it knows; later ids are refused. complete: the text so far is whole, so it may end here.
    fork: an independent matcher at the same place. advance: go past one token; False, and nothing changes, if the
    grammar refuses it. rollback: undo the last `count` advances. fill_mask: overwrite int32 words [ceil(vocab_size /
    32)] on the CPU; bit v % 32 of word v // 32 is set iff token v may follow. Ids that end a text are not its concern:
    they are allowed exactly when `complete` holds.
    """

    @property
    def vocab_size(self) -> int: ...
    @property
    def complete(self) -> bool: ...
    def fork(self) -> Matcher: ...
    def advance(self, token: int) -> bool: ...
    def rollback(self, count: int) -> None: ...
    def fill_mask(self, words: Tensor) -> None: ...


def pack_token_ids(ids: Collection[int], width: int) -> Tensor:
    """int32 [width] with the bits of the given ids set; ids that do not fit are passed over."""
    known = torch.tensor(sorted({token for token in ids if token < 32 * width}), dtype=torch.int64)
    bits = torch.zeros(width, dtype=torch.int64).index_add_(0, known // 32, 1 << known % 32)
    return torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32)


class GrammarState:
    """The matcher of one request, as its text grows.

    matcher: a grammar at its start (it is forked, not used up); ends: ids that end the text; generated: tokens that are
    there already. `error` is what went wrong with the matcher, if anything did: on committed tokens, from then on it
    allows nothing; on drafted ones, in the latest `fill`.
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
        """Words that its masks need."""
        return max(-(-self._start.vocab_size // 32), max(self._ends, default=0) // 32 + 1)

    def advance(self, tokens: Sequence[int]) -> None:
        """Go past committed tokens."""
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
        """Masks of the nodes of a tree, each on its own path: int32 words [n, W >= width] on the CPU.

        tokens, parents: of n nodes, root first (it is committed, so it is not advanced over), parents before children;
        wanted: fill only these. Returns which nodes can be reached; the others, below a token that the grammar refuses
        or that ends the text, have no mask. A node at which the matcher raises allows nothing, and neither does
        anything else if that is the root.
        """
        words.zero_()
        if not tokens:  # a row whose tree is grown already, beside others that go on
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
        """Whether any token may follow the text so far. Raises what the matcher raised."""
        words = torch.zeros(1, self.width, dtype=torch.int32)
        self.fill_masks([0], [-1], words)
        if self.error is not None:
            raise self.error
        return bool((words != 0).any())

    def _renew(self) -> bool:
        """A fresh matcher behind the committed text: one that raised may be in any state."""
        try:
            self._matcher = self._start.fork()
            for token in self._text:
                self._enter(token)
        except Exception as error:
            self.error, self._broken = error, True
        return not self._broken

    def _enter(self, token: int) -> None:
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
        """Visit all nodes but those below `failed` ones; the node at which the matcher raised, or None."""
        children: list[list[int]] = [[] for _ in tokens]
        for node, parent in enumerate(parents):
            if parent >= 0 and node not in failed:
                children[parent].append(node)
        todo = [0]  # ~node: leave it again
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
        except BaseException:  # Ctrl-C: the matcher may stand anywhere
            self._renew()
            raise
        return None

    def _mask(self, words: Tensor) -> None:
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
    return bool(0 <= token < 32 * words.shape[0] and int(words[token // 32]) >> token % 32 & 1)
