"""Prompt lookup: copies the tokens that followed an earlier occurrence of the newest n-gram (Saxena 2023).

Needs no model. Every row keeps an index of all n-grams, extended as tokens are committed, so a proposal costs the same
at any text length. The operator `ngram_match` returns the same matches from the tokens alone, by reading all of them,
for steps on a device. Tests: tests/drafters/test_ngram.py and the contract suite.
"""

from __future__ import annotations

from collections.abc import Sequence

from specdec_fast.core.draft import Draft
from specdec_fast.interfaces import Acceptance, Budget, Needs, Rng, StateView, TargetOutput
from specdec_kernels.unknown_names import unknown_name

MATCHES = ("last", "frequent")


class _Index:
    """An index of the n-grams of one row: `ends[gram]` is the position after the occurrence to copy from.

    With `frequent` it is the last occurrence followed by the most frequent next token, and `counts[*gram, next]` is the
    number of times each token followed. N-grams of all sizes share the tables, since their lengths differ.
    """

    def __init__(self, sizes: range, frequent: bool) -> None:
        self.sizes, self.longest, self.frequent = sizes, max(sizes), frequent
        self.ends: dict[tuple[int, ...], int] = {}
        self.counts: dict[tuple[int, ...], int] = {}
        self.indexed = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Indexes the n-grams that end before the newest token, so a look-up never finds itself."""
        ends, counts = self.ends, self.counts
        for end in range(self.indexed + 1, len(tokens)):
            window = tuple(tokens[max(end - self.longest, 0) : end])
            for size in self.sizes:
                if size > end:
                    continue
                gram = window[-size:]
                if self.frequent:
                    longer, before = (*gram, tokens[end]), ends.get(gram)
                    counts[longer] = count = 1 if before is None else counts.get(longer, 0) + 1
                    if before is not None and tokens[before] != tokens[end]:
                        rival = (*gram, tokens[before])
                        if count < counts[rival]:  # ties go to the one seen last
                            continue
                ends[gram] = end
        self.indexed = max(self.indexed, len(tokens) - 1)

    def find(self, tokens: Sequence[int]) -> int | None:
        """Returns the position to copy from, for the longest indexed suffix, or None."""
        newest = tuple(tokens[-self.longest :])
        for size in self.sizes:
            if size <= len(newest):
                end = self.ends.get(newest[-size:])
                if end is not None:
                    return end
        return None


class NgramDrafter:
    """Copies the continuation of the longest matching suffix.

    Args:
        num_draft_tokens: Default budget per row.
        n_max: Longest suffix that is looked up.
        n_min: Shortest suffix that is looked up.
        match: "last" copies after the last occurrence. "frequent" copies after the last occurrence that is followed by
            the most frequent next token.

    Raises:
        ValueError: If an option is out of range.

    Source:
        Saxena 2023, prompt lookup decoding.
    """

    name = "ngram"
    needs = Needs(topology="chain", host_tokens=True)

    def __init__(self, num_draft_tokens: int = 8, n_max: int = 4, n_min: int = 2, match: str = "last") -> None:
        if num_draft_tokens < 1:
            raise ValueError(f"ngram num_draft_tokens: got {num_draft_tokens}; expected at least 1")
        if not 1 <= n_min <= n_max:
            raise ValueError(f"ngram n_min, n_max: got {n_min}, {n_max}; expected 1 <= n_min <= n_max")
        if match not in MATCHES:
            raise ValueError(unknown_name("ngram match", match, MATCHES))
        self.num_draft_tokens = num_draft_tokens
        self._sizes = range(n_max, n_min - 1, -1)
        self._frequent = match == "frequent"
        self._rows: dict[int, _Index] = {}

    def begin(self, view: StateView, rows: Sequence[int], prompt_output: TargetOutput | None) -> None:
        """Indexes the prompts."""
        for row in rows:
            self._rows[row] = index = _Index(self._sizes, self._frequent)
            index.extend(view.tokens(row))

    def propose(self, view: StateView, rows: Sequence[int], budget: Budget, rng: Rng) -> Draft:
        """Copies what followed the longest matching suffix."""
        chains = []
        for row, limit in zip(rows, budget.nodes):
            tokens, index = view.tokens(row), self._rows[row]
            index.extend(tokens)
            chain = [tokens[-1]]
            end = index.find(tokens) if limit > 0 else None
            if end is not None:
                chain += tokens[end : end + limit]
                for at in range(len(chain), 1 + limit):  # a match close to the end continues in its own copy
                    chain.append(chain[at - (len(tokens) - end)])
            chains.append(chain)
        return Draft.chains(rows, chains, device=view.device)

    def observe(self, view: StateView, draft: Draft, acceptance: Acceptance, output: TargetOutput) -> None:
        """Does nothing: `propose` indexes committed tokens."""

    def release(self, rows: Sequence[int]) -> None:
        """Drops the indices of these rows."""
        for row in rows:
            self._rows.pop(row, None)


DRAFTER = NgramDrafter
