"""BannedContinuations: equal to a search of the whole text of every node; `forbid`."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec_fast.sampling.banned_continuations import BannedContinuations, forbid

TOKEN = st.integers(0, 3)  # few, so that texts repeat themselves; 0 must not pass for a place before the text


def searched(size: int, words: list[list[int]], text: list[int]) -> set[int]:
    """The definition: n-grams of the whole text, and words that the text has begun."""
    grams = {tuple(text[at : at + size]) for at in range(len(text) - size + 1)} if size else set()
    start = text[len(text) - size + 1 :] if size > 1 else []
    begun = len(start) == max(size - 1, 0)
    found = {gram[-1] for gram in grams if begun and [*gram[:-1]] == start}
    return found | {word[-1] for word in words if text[len(text) - len(word) + 1 :] == word[:-1]}


@settings(max_examples=300, deadline=None, derandomize=True)
@given(data=st.data())
def test_every_node_has_the_tokens_of_a_search_of_its_text(data: Any) -> None:
    size = data.draw(st.integers(0, 5))
    words = data.draw(st.lists(st.lists(TOKEN, min_size=1, max_size=4), max_size=4))
    text = data.draw(st.lists(TOKEN, min_size=1, max_size=12))
    known = data.draw(st.integers(0, len(text)))
    made = BannedContinuations(size, words, text[:known])
    made.append(text[known:])
    count = data.draw(st.integers(1, 8))
    tokens = [text[-1], *(data.draw(TOKEN) for _ in range(count - 1))]
    parents = [-1, *(data.draw(st.integers(0, node - 1)) for node in range(1, count))]
    wanted = data.draw(st.lists(st.integers(0, count - 1), unique=True))
    found = made.find(tokens, parents, wanted)
    for node, ids in zip(wanted, found, strict=True):
        path, here = [], node
        while here > 0:
            path.append(tokens[here])
            here = parents[here]
        own = [*text, *path[::-1]]
        assert {*ids, *made.everywhere.tolist()} == searched(size, words, own), (own, size, words)


def test_single_tokens_and_longer_words_go_together() -> None:
    made = BannedContinuations(1, [[5], [2, 3], [4, 2, 6]], [1, 4])
    made.append([2])
    (found,) = made.find([2], [-1], [0])
    assert {*found, *made.everywhere.tolist()} == {1, 2, 4, 5, 3, 6}


def test_large_ids_do_not_run_into_each_other() -> None:
    large = 2**31 - 1
    made = BannedContinuations(3, [], [large, 0, 5, large - 1, large, 0])
    assert made.find([0], [-1], [0]) == [[5]]
    assert BannedContinuations(3, [], [large, 1, 5, large - 1, large, 0]).find([0], [-1], [0]) == [[]]


@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_forbidding_hides_no_broken_logits(dtype: torch.dtype, padding: int) -> None:
    padded = torch.zeros(3, 3 + padding, dtype=dtype)
    logits = padded[1:, :3]  # models with a padded vocabulary have such rows
    logits.copy_(torch.tensor([[1.0, 2.0, math.nan], [math.inf, 2.0, 3.0]]))
    forbid(logits, [0, 1], [[2, 2, 7], [1]], torch.tensor([0, 9]))
    assert not padded[0].any() and not padded[:, 3:].any()
    want = torch.tensor([[-math.inf, 2.0, math.nan], [math.nan, -math.inf, 3.0]], dtype=dtype)
    assert torch.equal(logits.nan_to_num(nan=99.0), want.nan_to_num(nan=99.0))
