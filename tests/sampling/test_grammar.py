"""GrammarState: masks of a tree by advance and rollback equal those of a fresh matcher on every node's own path."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.toy_grammar import ToyMatcher, counting

from specdec_fast.sampling.grammar import GrammarState, Matcher, pack_token_ids

VOCAB = 40


def tokens_in(words: torch.Tensor) -> set[int]:
    return {32 * at + bit for at, word in enumerate(words.tolist()) for bit in range(32) if word >> bit & 1}


@given(st.sets(st.integers(0, 130)), st.integers(1, 5))
def test_mask_words_hold_the_ids_that_fit(ids: set[int], width: int) -> None:
    assert tokens_in(pack_token_ids(ids, width)) == {token for token in ids if token < 32 * width}


def test_the_toy_is_a_matcher() -> None:
    assert isinstance(counting(VOCAB), Matcher) and not isinstance(object(), Matcher)


@st.composite
def grammars(draw: st.DrawFn) -> ToyMatcher:
    states = draw(st.integers(1, 4))
    state, token = st.integers(0, states - 1), st.integers(0, VOCAB - 1)
    moves = {at: draw(st.dictionaries(token, state, max_size=6)) for at in range(states)}
    return ToyMatcher(moves, draw(st.lists(state, max_size=2)), VOCAB)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(grammar=grammars(), data=st.data())
def test_every_node_gets_the_mask_of_its_own_path(grammar: ToyMatcher, data: Any) -> None:
    ends = data.draw(st.lists(st.integers(0, VOCAB + 40), min_size=1, max_size=2))
    committed: list[int] = []
    for _ in range(data.draw(st.integers(0, 3))):
        follows = sorted(grammar.follows(committed)[0] - set(ends))
        if follows:
            committed.append(data.draw(st.sampled_from(follows)))
    guide = GrammarState(grammar, ends, committed[:1])
    guide.advance(committed[1:])
    likely = st.sampled_from(sorted({t for moves in grammar.moves.values() for t in moves} | set(ends)))
    parents, tokens = [-1], [0]
    for node in range(1, data.draw(st.integers(1, 9))):
        parents.append(data.draw(st.integers(0, node - 1)))
        tokens.append(data.draw(likely))
    wanted = data.draw(st.none() | st.sets(st.sampled_from(range(len(tokens)))))
    width = guide.width + data.draw(st.integers(0, 1))
    for _ in range(2):  # the walk restores the matcher
        words = torch.full((len(tokens), width), -1, dtype=torch.int32)
        reached = guide.fill_masks(tokens, parents, words, wanted)
        assert guide.error is None
        for node in range(len(tokens)):
            path, at = [], node
            while parents[at] >= 0:
                path.append(tokens[at])
                at = parents[at]
            text = [*committed, *path[::-1]]
            legal = all(
                token in grammar.follows(text[:place])[0] - set(ends)
                for place, token in enumerate(text)
                if place >= len(committed)
            )
            assert reached[node] == legal
            if legal and (wanted is None or node in wanted):
                follows, complete = grammar.follows(text)
                assert tokens_in(words[node]) == (follows - set(ends)) | (set(ends) if complete else set())
    assert grammar.states == [0], "the prototype was used up"


class FailingMatcher(ToyMatcher):
    """Raises at one token, in one method."""

    where, token = "advance", 7

    def fork(self) -> Any:
        made = super().fork()
        made.where, made.token = self.where, self.token
        made.here = None
        return made

    def advance(self, token: int) -> bool:
        self.here = token
        if token == self.token and self.where == "advance":
            self.states = []  # after an error, a library may be in any state
            raise RuntimeError("gave up")
        return False if token == self.token and self.where == "refuse" else super().advance(token)

    def fill_mask(self, words: torch.Tensor) -> None:
        if self.here == self.token and self.where == "fill_mask":
            self.states = []
            raise RuntimeError("gave up")
        super().fill_mask(words)


@pytest.mark.parametrize("where", ["advance", "fill_mask", "refuse"])
def test_an_error_at_a_draft_token_masks_that_node_only(where: str) -> None:
    everything = ToyMatcher({0: dict.fromkeys(range(VOCAB), 0)}, [0], VOCAB)
    failing = FailingMatcher(everything.moves, [0], VOCAB)
    failing.where = where
    tokens, parents = [0, 3, 7, 5, 4, 7], [-1, 0, 0, 2, 1, 4]
    guide = GrammarState(failing, [39], [1, 2])
    words = torch.zeros(6, 2, dtype=torch.int32)
    reached = guide.fill_masks(tokens, parents, words)
    assert reached == [True, True, True, False, True, True] and guide.error is not None
    for node in (0, 1, 4):
        assert len(tokens_in(words[node])) == VOCAB
    assert not words[[2, 5]].any()
    assert guide.fill_masks([0, 3], [-1, 0], torch.zeros(2, 2, dtype=torch.int32)) == [True, True]
    assert guide.error is None, "a draft that is gone must not end the request"


def test_after_an_error_on_committed_tokens_no_token_is_allowed() -> None:
    failing = FailingMatcher({0: dict.fromkeys(range(VOCAB), 0)}, [0], VOCAB)
    guide = GrammarState(failing, [39])
    guide.advance([1, 7, 2])
    for _ in range(2):
        words = torch.full((2, 2), -1, dtype=torch.int32)
        assert guide.fill_masks([0, 1], [-1, 0], words) == [True, True]
        assert not words.any() and str(guide.error) == "gave up"
    with pytest.raises(RuntimeError, match="gave up"):
        guide.can_start()


def test_tokens_after_the_end_are_not_checked() -> None:
    guide = GrammarState(ToyMatcher({0: {1: 1}, 1: {}}, [1], VOCAB), [5])
    guide.advance([1, 5, 30])
    assert guide.error is None


def test_opening_checks_whether_a_text_can_begin() -> None:
    assert GrammarState(ToyMatcher({0: {1: 0}}, [], VOCAB), [2]).can_start()
    assert GrammarState(ToyMatcher({0: {}}, [0], VOCAB), [2]).can_start(), "an empty text is complete"
    assert not GrammarState(ToyMatcher({0: {}}, [], VOCAB), [2]).can_start()
    assert not GrammarState(ToyMatcher({0: {2: 0}}, [], VOCAB), [2]).can_start(), "only an end, and not complete"
