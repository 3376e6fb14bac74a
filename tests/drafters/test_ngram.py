"""Prompt lookup against a search that reads the whole text each time."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch
from oracles.automaton import scripted

from specdec_fast import Engine, get_drafter
from specdec_fast.engine.state import DecodeState
from specdec_fast.interfaces import Budget, Rng
from specdec_fast.sampling.params import SamplingParams
from specdec_kernels import ngram_match


def search(tokens: list[int], limit: int, n_max: int, n_min: int, match: str) -> list[int]:
    """Returns the tokens after the earlier place of the longest suffix, continued into its own copy."""
    for size in range(min(n_max, len(tokens)), n_min - 1, -1):
        gram = tokens[-size:]
        ends = [end for end in range(size, len(tokens)) if tokens[end - size : end] == gram]
        if match == "frequent":
            counts = Counter(tokens[end] for end in ends)
            ends = [end for end in ends if counts[tokens[end]] == max(counts.values())]
        if ends:
            grown = list(tokens)
            for at in range(limit):
                grown.append(grown[ends[-1] + at])
            return grown[len(tokens) :]
    return []


class Rows:
    """A state with rows, and the drafter's proposals for them."""

    def __init__(self, drafter: object, prompts: list[list[int]]) -> None:
        self.drafter, self.state = drafter, DecodeState(8, 4000)
        params = SamplingParams(seed=1)
        self.rows = [self.state.join(prompt, params, len(prompt), ()) for prompt in prompts]
        drafter.begin(self.state, self.rows, None)  # type: ignore[attr-defined]

    def propose(self, limits: list[int]) -> list[list[int]]:
        count = len(self.rows)
        rng = Rng(torch.zeros(count, dtype=torch.int64), torch.zeros(count, dtype=torch.int32))
        draft = self.drafter.propose(self.state, self.rows, Budget(limits), rng)  # type: ignore[attr-defined]
        draft.check(100)
        tokens, bounds = draft.tokens.tolist(), draft.offsets.tolist()
        assert draft.rows.tolist() == self.rows and draft.is_chain
        chains = [tokens[a:b] for a, b in pairwise(bounds)]
        assert [chain[0] for chain in chains] == [self.state.tokens(row)[-1] for row in self.rows]
        return [chain[1:] for chain in chains]


def ask(tokens: list[int], limit: int = 4, **settings: Any) -> list[int]:
    return Rows(get_drafter("ngram")(**settings), [tokens]).propose([limit])[0]


def test_by_hand() -> None:
    assert ask([1, 2, 3, 9, 1, 2], n_min=2) == [3, 9, 1, 2]
    assert ask([1, 2, 3, 1, 2, 4, 1, 2], n_min=2, limit=2) == [4, 1], "the last occurrence wins"
    assert ask([7, 1, 2, 3, 8, 1, 2, 9, 7, 1, 2], n_max=3, n_min=2, limit=1) == [3], "the longest suffix wins"
    assert ask([5, 5, 5], n_min=1) == [5, 5, 5, 5], "a match at the end runs on into its own copy"
    assert ask([1, 2, 1, 2], n_min=2, limit=5) == [1, 2, 1, 2, 1]


def test_no_token_is_proposed_without_a_match() -> None:
    assert ask([1, 2, 3, 4]) == [] and ask([3]) == [] and ask([3, 3]) == []
    assert ask([1, 2, 3, 1], n_min=2) == [], "one token is too short a match"
    assert ask([1, 2, 9, 1, 2], n_min=2, limit=0) == []


def test_the_most_frequent_match() -> None:
    text = [1, 2, 7, 3, 1, 2, 7, 4, 1, 2, 8, 5, 1, 2]
    assert ask(text, limit=3) == [8, 5, 1]
    assert ask(text, limit=3, match="frequent") == [7, 4, 1], "the last of the commonest continuations"
    assert ask([1, 2, 7, 1, 2, 8, 1, 2], limit=1, match="frequent") == [8], "of two that tie, the last"


@pytest.mark.parametrize("match", ["last", "frequent"])
@pytest.mark.parametrize("seed", range(6))
def test_growing_texts_against_a_plain_search(seed: int, match: str) -> None:
    """The index is extended step by step, and results equal a search through the whole text."""
    source = random.Random(seed)
    n_min = source.randrange(1, 3)
    n_max = n_min + source.randrange(3)
    vocab = source.choice([2, 4, 9])
    texts = [[source.randrange(vocab) for _ in range(source.randrange(1, 30))] for _ in range(3)]
    rows = Rows(get_drafter("ngram")(n_max=n_max, n_min=n_min, match=match), texts)
    for _ in range(40):
        limits = [source.randrange(7) for _ in rows.rows]
        got = rows.propose(limits)
        for text, limit, chain in zip(texts, limits, got, strict=True):
            assert chain == (search(text, limit, n_max, n_min, match) if limit else [])
        for text, row in zip(texts, rows.rows, strict=True):
            more = [source.randrange(vocab) for _ in range(source.randrange(1, 5))]
            text.extend(more)
            rows.state.append([row], [more])


@pytest.mark.parametrize("match", ["last", "frequent"])
def test_the_operator_gives_the_same_results(match: str) -> None:
    source = random.Random(7)
    texts = [[source.randrange(4) for _ in range(source.randrange(2, 60))] for _ in range(8)]
    chains = Rows(get_drafter("ngram")(match=match), texts).propose([5] * 8)
    lengths = torch.tensor([len(text) for text in texts], dtype=torch.int32)
    packed = torch.tensor([token for text in texts for token in text])
    drafts, matched = ngram_match(packed, lengths.long().cumsum(0) - lengths, lengths, 4, 2, 5, match == "frequent")
    assert [row if size else [] for row, size in zip(drafts.tolist(), matched.tolist(), strict=True)] == chains
    assert any(chains) and not all(chains)


@pytest.mark.parametrize("count", [1, 3, 7, 11])
def test_a_text_that_repeats_its_prompt_costs_one_pass_for_each_full_draft(count: int) -> None:
    """All draft tokens are accepted: each pass gives them and one more, over three times the period."""
    script = [1, 4, 2, 5, 7, 6, 0, 3] * 5
    engine = Engine(scripted(script, 8, max_rows=1, max_length=64), get_drafter("ngram")(num_draft_tokens=count))
    handle = engine.generate([script[:11]], SamplingParams(temperature=0, max_new_tokens=24))[0]
    assert handle.tokens == script[11:35] and handle.stats.steps == -(-24 // (count + 1))


def test_a_reused_row_starts_empty() -> None:
    drafter = get_drafter("ngram")(n_min=2)
    rows = Rows(drafter, [[1, 2, 3, 1, 2]])
    assert rows.propose([2]) == [[3, 1]]
    drafter.release(rows.rows)
    rows.state.leave(rows.rows[0])
    assert rows.state.join([1, 2], SamplingParams(seed=1), 2, ()) == rows.rows[0]
    drafter.begin(rows.state, rows.rows, None)
    assert rows.propose([2]) == [[]]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_draft_tokens": 0}, "ngram num_draft_tokens: got 0; expected at least 1"),
        ({"n_min": 0}, "ngram n_min, n_max: got 0, 4; expected 1 <= n_min <= n_max"),
        ({"n_min": 3, "n_max": 2}, "ngram n_min, n_max: got 3, 2"),
        ({"match": "first"}, "ngram match: got 'first'; expected one of last, frequent"),
    ],
)
def test_bad_options(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_drafter("ngram")(**settings)
