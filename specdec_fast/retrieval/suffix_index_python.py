"""The suffix structures in Python: the specification, and the fallback without compiled code. See suffix_index.py.

Results equal those of csrc/suffix, floats included. Tests: tests/retrieval/test_suffix_index.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np

from specdec_fast.retrieval.tree_growth import (
    Continuation,
    Grown,
    Noise,
    check_tokens,
    depth_limit,
    grow,
    unseen_weight,
)

COUNTED = 64  # suffix links along which an occurrence is counted
LOOKED = 128  # continuations of one context that growth of an automaton considers


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
        """Appends tokens to the text."""
        for token in check_tokens(tokens):
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
            edges[up][token] = edges[up].pop(token)  # now the newest
            up, left = link[up], left - 1
        if state >= 0:
            following = edges[state][token]
            if length[following] == length[state] + 1:
                link[added] = following
            else:  # its shorter strings now end at more places than its longest one, so they get a state of their own
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
        """Tokens of the text."""
        return self._length[self._last]

    @property
    def states(self) -> int:
        """Number of states."""
        return len(self._length)

    def match(self) -> int:
        """Returns the length of the longest suffix of the text that occurred before; the two may overlap."""
        return self._length[self._link[self._last]] if self._last else 0

    def count(self, tokens: Sequence[int]) -> int:
        """Returns how often a string occurs: exact below COUNTED suffix links, else a lower bound."""
        state = 0
        for token in check_tokens(tokens):
            if token not in self._edges[state]:
                return 0
            state = self._edges[state][token]
        return self._count[state] if state else len(self) + 1

    def grow(
        self, nodes: int, min_match: int, factor: float, min_probability: float, noise: Noise | None = None
    ) -> Grown:
        """Grows a tree of the continuations of `match()`, from the LOOKED most recent ones of each context."""
        match = self.match()
        if match == 0 or match < min_match:
            return [], [], 0.0, match

        def children(state: int) -> tuple[list[Continuation], float]:
            edges = islice(reversed(self._edges[state].items()), LOOKED)
            found: list[Continuation] = [(token, self._count[target], target) for token, target in edges]
            return found, unseen_weight(len(found), match)

        depth = depth_limit(nodes, factor, match)
        return grow(self._link[self._last], depth, nodes, min_probability, children, match, noise)


class CountedTree:
    """Counted tree of all strings of at most `depth` tokens in a changing set of texts."""

    def __init__(self, depth: int) -> None:
        self._depth, self._next, self._size = depth, 0, 0
        self._root: list[Any] = [0, {}]  # count, children by token
        self._texts: dict[int, list[int]] = {}

    def add(self, tokens: Sequence[int]) -> int:
        """Adds a text and returns its id."""
        text = list(check_tokens(tokens))
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
        """Removes a text and its counts. Returns False for an unknown id."""
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
        """Counts the occurrences of a sequence."""
        node = self._find(check_tokens(tokens))
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
        """Grows a tree of the continuations of the context's longest suffix in the tree, up to max_match tokens."""
        check_tokens(context)
        for match in range(min(max_match, len(context), self._depth - 1), -1, -1):
            node = self._find(context[len(context) - match :])
            if node is not None:
                break
        if match == 0 or match < min_match:
            return [], [], 0.0, match

        def children(place: Any) -> tuple[list[Continuation], float]:
            found = [(token, child[0], child) for token, child in place[1].items()]
            return found, unseen_weight(len(found), match)

        return grow(node, depth_limit(nodes, factor, match), nodes, min_probability, children, match, noise)


class Successors:
    """The likeliest next tokens that the target showed for each token when it was last scored."""

    def __init__(self) -> None:
        self._seen: dict[int, list[tuple[int, float]]] = {}

    def learn(self, tokens: Any, following: Any, values: Any) -> None:
        """Stores next tokens; of equal tokens the last node counts.

        Args:
            tokens: Tokens of M nodes.
            following: Their next tokens, likeliest first and padded with -1, [M, k].
            values: Log-probabilities of these, [M, k].

        Raises:
            ValueError: If the sizes differ.
        """
        if len(following) != len(tokens) or np.shape(following) != np.shape(values):
            raise ValueError("successors: expected as many next tokens and log-probabilities for every token")
        for token, ids, own in zip(np.asarray(tokens).tolist(), np.asarray(following), np.asarray(values)):
            self._seen[token] = [(int(next_one), float(value)) for next_one, value in zip(ids, own) if next_one >= 0]

    def __len__(self) -> int:
        return sum(map(bool, self._seen.values()))

    def after(self, token: int) -> list[tuple[int, float]]:
        """Returns (next token, log-probability) of a token, likeliest first; empty for unseen tokens."""
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
        """Grows a tree by these distributions, at a temperature and after top-k, top-p and min-p."""

        def children(token: int) -> tuple[list[Continuation], float]:
            following = self.after(token)
            if not following:
                return [], 0.0
            top = following[0][1]  # weights relative to the likeliest token never all underflow
            found = [(own, math.exp(inv_t * (value - top)), own) for own, value in following]
            # no unlisted token is likelier than the last listed one
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
    """A token stream with its suffix array, both numpy arrays. Tokens from `separator` on end a document."""

    def __init__(self, tokens: Any, suffixes: Any, separator: int) -> None:
        if len(tokens) != len(suffixes):
            raise ValueError(f"suffix array: got {len(tokens)} tokens and {len(suffixes)} suffixes; expected as many")
        self.tokens, self.suffixes, self.separator = np.asarray(tokens), np.asarray(suffixes), separator

    def position(self, rank: int) -> int:
        """Returns the position of the suffix at a rank. Raises IndexError if the array is damaged."""
        at = int(self.suffixes[rank])
        if not 0 <= at < len(self.tokens):
            raise IndexError("suffix array")
        return at

    def token(self, at: int) -> int:
        """Returns the token at a position, or -1 at the end of a document."""
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
        """Returns the ranks [low, high) of the suffixes that start with a string of tokens."""
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
    """Grows a tree of the continuations of the context's longest suffix in any array, counted over all arrays."""
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
        return listed, unseen_weight(len(listed), match)

    return grow((match, found), min(depth, nodes), nodes, min_probability, children, match, noise, len(found))
