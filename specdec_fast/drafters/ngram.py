"""Prompt lookup: the tokens that followed the last occurrence of the newest n-gram (Saxena 2023, prompt lookup).

Needs no model. Keeps an index of every n-gram's last place per row, extended as tokens are committed.
Tests: tests/drafters/test_ngram.py and the contract suite.
"""

from __future__ import annotations

from collections.abc import Sequence

from specdec_fast.draft import Draft
from specdec_fast.interfaces import Acceptance, Budget, Needs, Rng, StateView, TargetOutput


class _Index:
    """Where each n-gram of a row was last seen: `ends[n][gram]` is the position after it."""

    def __init__(self, sizes: range) -> None:
        self.ends: dict[int, dict[tuple[int, ...], int]] = {size: {} for size in sizes}
        self.indexed = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Index n-grams that end before the newest token (so that a look-up never finds itself)."""
        for end in range(self.indexed + 1, len(tokens)):
            for size, ends in self.ends.items():
                if size <= end:
                    ends[tuple(tokens[end - size : end])] = end
        self.indexed = max(self.indexed, len(tokens) - 1)

    def find(self, tokens: Sequence[int]) -> int | None:
        """Position after the last earlier occurrence of the longest indexed suffix, or None."""
        for size, ends in self.ends.items():
            if size <= len(tokens):
                end = ends.get(tuple(tokens[-size:]))
                if end is not None:
                    return end
        return None


class NgramDrafter:
    """Copies up to `num_draft_tokens` tokens behind the last match of the longest suffix of n_max..n_min tokens."""

    name = "ngram"
    needs = Needs(topology="chain", host_tokens=True)

    def __init__(self, num_draft_tokens: int = 8, n_max: int = 4, n_min: int = 2) -> None:
        if num_draft_tokens < 1:
            raise ValueError(f"ngram num_draft_tokens: got {num_draft_tokens}; expected at least 1")
        if not 1 <= n_min <= n_max:
            raise ValueError(f"ngram n_min, n_max: got {n_min}, {n_max}; expected 1 <= n_min <= n_max")
        self.num_draft_tokens = num_draft_tokens
        self._sizes = range(n_max, n_min - 1, -1)
        self._rows: dict[int, _Index] = {}

    def begin(self, view: StateView, rows: Sequence[int], prompt_output: TargetOutput | None) -> None:
        for row in rows:
            self._rows[row] = _Index(self._sizes)

    def propose(self, view: StateView, rows: Sequence[int], budget: Budget, rng: Rng) -> Draft:
        chains = []
        for row, limit in zip(rows, budget.nodes):
            tokens, index = view.tokens(row), self._rows[row]
            index.extend(tokens)
            chain = [tokens[-1]]
            end = index.find(tokens) if limit > 0 else None
            if end is not None:
                source = list(tokens)
                for _ in range(limit):  # a match close to the end runs on into its own copy
                    source.append(source[end])
                    end += 1
                chain.extend(source[len(tokens) :])
            chains.append(chain)
        return Draft.chains(rows, chains, device=view.device)

    def observe(self, view: StateView, draft: Draft, acceptance: Acceptance, output: TargetOutput) -> None:
        pass

    def release(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._rows.pop(row, None)


DRAFTER = NgramDrafter
