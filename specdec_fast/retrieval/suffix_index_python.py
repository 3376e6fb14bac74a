"""The suffix structures in Python: what is right, and what serves where nothing was compiled. See stores/suffix.py.

Answers equal those of csrc/suffix, floats included. Tests: tests/retrieval/test_suffix_index.py.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch

from specdec_kernels.random import REPLAY, gumbel, words

Grown = tuple[list[int], list[int], float, int]
Continuation = tuple[int, float, Any]
Noise = tuple[int, int]
COUNTED = 64  # suffix links that one more occurrence is counted along
LOOKED = 128  # continuations of one context of an automaton that growth looks at


def unseen(kinds: int, match: int) -> float:
    """The weight of what was never seen behind a match: one part for every other token that was seen, less the longer
    the match is (Witten and Bell 1991, method C, over the square of the length).
    """
    return kinds / match**2


def run_race(noise: Noise, depth: int, rest: float, found: Sequence[Continuation]) -> list[Continuation]:
    """The chance of each continuation to be the one, in place of its weight: with z = log(weight) + noise it is a share
    of exp(z) among the siblings (how far to trust the weights), times the chance exp(-rest / exp(z)) that nothing of
    the weight `rest`, whose tokens are not known, comes out higher.
    """
    ids = torch.tensor([token for token, _, _ in found], dtype=torch.int64)
    drawn = gumbel(words(noise[0], noise[1] + depth, 0, REPLAY, ids)).tolist()
    raised = [weight * math.exp(own) for (_, weight, _), own in zip(found, drawn)]
    total = sum(raised)
    won = [own / total * math.exp(-rest / own) if own > 0 else 0.0 for own in raised]
    return [(token, own, place) for own, (token, _, place) in zip(won, found)]


def grow(
    start: Any,
    depth: int,
    nodes: int,
    min_probability: float,
    children: Callable[[Any], tuple[Sequence[Continuation], float]],
    match: int,
    noise: Noise | None = None,
    base: int = 0,
) -> Grown:
    """Best-first growth from weights. children(place): (token, weight, place) of every continuation, and the weight of
    those that cannot be listed, which counts in a race alone. noise: seed and position of the root.

    The likeliest path first; ties go to the elder parent, then to the lower token. A path's probability is the product
    of its tokens' shares among their siblings, or, where `base` is given and there is no race, the path's own weight as
    a share of that.
    """
    tokens: list[int] = []
    parents: list[int] = []
    expected = 0.0
    heap: list[tuple[float, int, int, int, Any]] = []

    def push(place: Any, probability: float, node: int, below: int) -> None:
        if below >= depth:
            return
        found, rest = children(place)
        total: float = base or sum(weight for _, weight, _ in found)
        above = 1.0 if base else probability
        if noise is not None and found:
            found, total, above = run_race(noise, below + 1, rest, found), 1.0, probability
        for token, weight, child in found:
            own = above * weight / total
            if own >= min_probability:
                heapq.heappush(heap, (-own, node, token, below + 1, child))

    push(start, 1.0, 0, 0)
    while heap and len(tokens) < nodes:
        negative, parent, token, below, place = heapq.heappop(heap)
        tokens.append(token)
        parents.append(parent)
        expected -= negative
        push(place, -negative, len(tokens), below)
    return tokens, parents, expected, match


def depth_of(nodes: int, factor: float, match: int) -> int:
    return min(nodes, max(1, int(min(nodes, factor * match))))


def check(tokens: Sequence[int]) -> Sequence[int]:
    for token in tokens:
        if not 0 <= token < 2**31:
            raise ValueError(f"suffix: got token {token}; expected 0 to 2**31 - 1")
    return tokens


class Automaton:
    """Suffix automaton of one growing text (Blumer et al. 1985)."""

    def __init__(self) -> None:
        self._length, self._link, self._count = [0], [-1], [0]
        self._edges: list[dict[int, int]] = [{}]  # the newest last
        self._last = 0

    def _add(self, length: int, link: int, count: int, edges: dict[int, int]) -> int:
        self._length.append(length)
        self._link.append(link)
        self._count.append(count)
        self._edges.append(edges)
        return len(self._length) - 1

    def extend(self, tokens: Sequence[int]) -> None:
        for token in check(tokens):
            self._append(token)

    def _append(self, token: int) -> None:
        edges, link, length = self._edges, self._link, self._length
        state, added = self._last, self._add(length[self._last] + 1, 0, 1, {})
        self._last = added
        while state >= 0 and token not in edges[state]:
            edges[state][token] = added
            state = link[state]
        up, left = state, COUNTED
        while up >= 0 and left:
            edges[up][token] = edges[up].pop(token)  # seen again
            up, left = link[up], left - 1
        if state >= 0:
            following = edges[state][token]
            if length[following] == length[state] + 1:
                link[added] = following
            else:  # its shorter strings now end at more places than its longest: they get a state of their own
                clone = self._add(length[state] + 1, link[following], self._count[following], dict(edges[following]))
                while state >= 0 and edges[state].get(token) == following:
                    edges[state][token] = clone
                    state = link[state]
                link[following] = link[added] = clone
        up, left = link[added], COUNTED
        while up > 0 and left:
            self._count[up] += 1
            up, left = link[up], left - 1

    def __len__(self) -> int:
        return self._length[self._last]

    @property
    def states(self) -> int:
        return len(self._length)

    def match(self) -> int:
        """Length of the longest suffix of the text that occurred in it before (the two may overlap)."""
        return self._length[self._link[self._last]] if self._last else 0

    def count(self, tokens: Sequence[int]) -> int:
        """How often a string occurs: exact below COUNTED suffix links, else at least this."""
        state = 0
        for token in check(tokens):
            if token not in self._edges[state]:
                return 0
            state = self._edges[state][token]
        return self._count[state] if state else len(self) + 1

    def grow(
        self, nodes: int, min_match: int, factor: float, min_probability: float, noise: Noise | None = None
    ) -> Grown:
        """Continuations of that suffix: of those of any context the LOOKED that were added or seen again last."""
        match = self.match()
        if match == 0 or match < min_match:
            return [], [], 0.0, match

        def children(state: int) -> tuple[list[Continuation], float]:
            edges = islice(reversed(self._edges[state].items()), LOOKED)
            found: list[Continuation] = [(token, self._count[target], target) for token, target in edges]
            return found, unseen(len(found), match)

        depth = depth_of(nodes, factor, match)
        return grow(self._link[self._last], depth, nodes, min_probability, children, match, noise)


class CountedTree:
    """Counted tree of all strings of at most `depth` tokens in a set of texts that come and go."""

    def __init__(self, depth: int) -> None:
        self._depth, self._next, self._size = depth, 0, 0
        self._root: list[Any] = [0, {}]  # count, children by token
        self._texts: dict[int, list[int]] = {}

    def add(self, tokens: Sequence[int]) -> int:
        """Adds a text and returns its id."""
        text = list(check(tokens))
        for start in range(len(text)):
            node = self._root
            for token in text[start : start + self._depth]:
                node = node[1].setdefault(token, [0, {}])
                node[0] += 1
        self._next += 1
        self._texts[self._next - 1] = text
        self._size += len(text)
        return self._next - 1

    def remove(self, text_id: int) -> bool:
        """Takes a text out again, as if it had never been there. False for an id that is not there."""
        text = self._texts.pop(text_id, None)
        if text is None:
            return False
        for start in range(len(text)):
            node = self._root
            for token in text[start : start + self._depth]:
                child = node[1][token]
                child[0] -= 1
                if child[0] == 0:
                    del node[1][token]
                node = child
        self._size -= len(text)
        return True

    def __len__(self) -> int:
        return self._size

    def _find(self, tokens: Sequence[int]) -> Any:
        node = self._root
        for token in tokens:
            node = node[1].get(token)
            if node is None:
                return None
        return node

    def count(self, tokens: Sequence[int]) -> int:
        node = self._find(check(tokens))
        return self._size if node is self._root else 0 if node is None else int(node[0])

    def grow(
        self,
        context: Sequence[int],
        max_match: int,
        nodes: int,
        min_match: int,
        factor: float,
        min_probability: float,
        noise: Noise | None = None,
    ) -> Grown:
        """Continuations of the longest suffix of a context that is there, of at most max_match tokens."""
        check(context)
        for match in range(min(max_match, len(context), self._depth - 1), -1, -1):
            node = self._find(context[len(context) - match :])
            if node is not None:
                break
        if match == 0 or match < min_match:
            return [], [], 0.0, match

        def children(place: Any) -> tuple[list[Continuation], float]:
            found = [(token, child[0], child) for token, child in place[1].items()]
            return found, unseen(len(found), match)

        return grow(node, depth_of(nodes, factor, match), nodes, min_probability, children, match, noise)


class Successors:
    """What the target showed behind each token when it was last scored: its likeliest next tokens."""

    def __init__(self) -> None:
        self._seen: dict[int, list[tuple[int, float]]] = {}

    def learn(self, tokens: Any, following: Any, values: Any) -> None:
        """Of nodes with these tokens [M], the next tokens [M, k], likeliest first, -1 padded, and their
        log-probabilities; of equal tokens the last node counts.
        """
        if len(following) != len(tokens) or np.shape(following) != np.shape(values):
            raise ValueError("successors: expected as many next tokens and log-probabilities for every token")
        for token, ids, own in zip(np.asarray(tokens).tolist(), np.asarray(following), np.asarray(values)):
            self._seen[token] = [(int(next_one), float(value)) for next_one, value in zip(ids, own) if next_one >= 0]

    def __len__(self) -> int:
        return sum(map(bool, self._seen.values()))

    def after(self, token: int) -> list[tuple[int, float]]:
        """(next token, log-probability), the likeliest first; nothing for a token that was not seen."""
        return self._seen.get(token, [])

    def grow(
        self,
        root: int,
        depth: int,
        nodes: int,
        min_probability: float,
        inv_t: float,
        top_k: int,
        top_p: float,
        min_p: float,
        noise: Noise | None = None,
    ) -> Grown:
        """Trees by these distributions at a temperature, of what top-k, top-p and min-p leave of them (0, 1 and 0:
        all).
        """

        def children(token: int) -> tuple[list[Continuation], float]:
            following = self.after(token)
            if not following:
                return [], 0.0
            top = following[0][1]  # weights are relative to the likeliest: they never underflow to 0 for all
            found = [(own, math.exp(inv_t * (value - top)), own) for own, value in following]
            # each token that is not listed is at most as likely as the last that is
            rest = max(1 - sum(math.exp(value) for _, value in following), 0.0)
            rest *= math.exp((inv_t - 1) * following[-1][1] - inv_t * top)
            total, kept, reached = sum(weight for _, weight, _ in found) + rest, 0, 0.0
            for _, weight, _ in found:
                if kept and (kept == top_k or reached >= top_p * total or weight < min_p * found[0][1]):
                    return found[:kept], 0.0
                kept, reached = kept + 1, reached + weight
            return found, rest

        return grow(root, depth, nodes, min_probability, children, 0, noise)


class Array:
    """A token stream with its suffix array: numpy arrays, tokens from `separator` on end a document."""

    def __init__(self, tokens: Any, suffixes: Any, separator: int) -> None:
        if len(tokens) != len(suffixes):
            raise ValueError(f"suffix array: got {len(tokens)} tokens and {len(suffixes)} suffixes; expected as many")
        self.tokens, self.suffixes, self.separator = np.asarray(tokens), np.asarray(suffixes), separator

    def position(self, rank: int) -> int:
        at = int(self.suffixes[rank])
        if not 0 <= at < len(self.tokens):
            raise IndexError("suffix array")
        return at

    def token(self, at: int) -> int:
        """Token at a position, or -1 at the end of a document."""
        found = int(self.tokens[at]) if at < len(self.tokens) else self.separator
        return found if found < self.separator else -1

    def _bound(self, tokens: list[float], after: bool) -> int:
        low, high = 0, len(self.tokens)
        while low < high:
            middle = (low + high) // 2
            at = self.position(middle)
            # A separator sorts above all tokens and equals none; a suffix that is cut off comes first.
            own = [float(token) if token < self.separator else math.inf for token in self.tokens[at : at + len(tokens)]]
            if own < tokens or (after and own == tokens):
                low = middle + 1
            else:
                high = middle
        return low

    def range(self, tokens: Sequence[int]) -> tuple[int, int]:
        """[low, high) of the suffixes that start with a string of tokens."""
        wanted = [float(token) for token in tokens]
        return self._bound(wanted, False), self._bound(wanted, True)


def look_up(
    arrays: Sequence[Array],
    context: Sequence[int],
    max_match: int,
    depth: int,
    samples: int,
    nodes: int,
    min_match: int,
    min_probability: float,
    noise: Noise | None = None,
) -> Grown:
    """Continuations of the longest suffix of a context that any of the arrays has, counted over all of them."""
    for match in range(min(max_match, len(context)), min_match - 1, -1):
        ranges = [array.range(context[len(context) - match :]) for array in arrays]
        if any(high > low for low, high in ranges):
            break
    else:
        return [], [], 0.0, 0
    found: list[tuple[Array, int]] = []
    for array, (low, high) in zip(arrays, ranges):
        taken = min(high - low, samples)
        found += [(array, array.position(low + sample * (high - low) // taken)) for sample in range(taken)]

    def children(place: tuple[int, list[tuple[Array, int]]]) -> tuple[list[Continuation], float]:
        below, places = place
        by_token: dict[int, list[tuple[Array, int]]] = {}
        for array, at in places:
            token = array.token(at + below)
            if token >= 0:
                by_token.setdefault(token, []).append((array, at))
        ordered = sorted(by_token.items())
        listed: list[Continuation] = [(token, len(own), (below + 1, own)) for token, own in ordered]
        return listed, unseen(len(listed), match)

    return grow((match, found), min(depth, nodes), nodes, min_probability, children, match, noise, len(found))
