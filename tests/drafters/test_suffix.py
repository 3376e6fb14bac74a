"""Suffix decoding: the source that proposes, depths, texts of finished requests, and files."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles.automaton import AutomatonTarget, random_logits

from specdec_fast import Engine, SamplingParams, get_drafter
from specdec_fast.core.draft import Draft
from specdec_fast.drafters import make_drafter
from specdec_fast.engine.state import DecodeState
from specdec_fast.interfaces import Budget

VOCAB = 40


class Row:
    """One row of a state, and a drafter's proposals for it."""

    def __init__(self, drafter: Any, prompt: list[int]) -> None:
        self.drafter, self.state = drafter, DecodeState(2, 4000)
        self.row = self.state.join(prompt, SamplingParams(seed=1), len(prompt), ())
        drafter.begin(self.state, [self.row], None)

    def draft(self, limit: int = 8) -> Draft:
        made: Draft = self.drafter.propose(self.state, [self.row], Budget([limit]), self.state.rng([self.row]))
        made.check(VOCAB)
        return made

    def tree(self, limit: int = 8) -> tuple[list[int], list[int]]:
        made = self.draft(limit)
        return made.tokens.tolist()[1:], made.parents.tolist()[1:]

    def append(self, tokens: list[int]) -> None:
        draft = self.draft(0)
        self.state.append([self.row], [tokens])
        self.drafter.observe(self.state, draft, None, None)

    def finish(self) -> None:
        self.drafter.release([self.row])
        self.state.leave(self.row)


def suffix(**options: Any) -> Any:
    return get_drafter("suffix")(**options)


def test_the_longest_match_proposes_and_bounds_the_depth() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2]
    assert Row(suffix(factor=1.0), text).tree() == ([3, 4], [0, 1]), "a match of two tokens is worth two"
    assert Row(suffix(factor=2.0), text).tree() == ([3, 4, 5, 6], [0, 1, 2, 3])
    assert Row(suffix(factor=0.1), text).tree() == ([3], [0]), "one token at least"
    assert Row(suffix(factor=9.0), text).tree(3)[0] == [3, 4, 5], "the budget"
    assert Row(suffix(min_match=3), text).tree() == ([], [])
    assert Row(suffix(), [1, 2, 3]).tree() == ([], []) == Row(suffix(), text).tree(0)


def test_texts_that_leave_after_steps_that_were_not_seen_are_remembered_whole() -> None:
    made = suffix(shared=True)
    first = Row(made, [30])
    first.state.append([first.row], [[1, 2, 3, 4, 5, 6]])
    made.catch_up(first.state, [first.row, 1])  # no request is in row 1
    first.finish()
    second = Row(made, [31, 1, 2, 3, 4])
    assert second.tree(2) == ([5, 6], [0, 1])


def test_a_long_match_ends_a_pause_of_steps_that_were_not_seen() -> None:
    """Tokens of steps that the drafter missed are in its automaton when it is asked."""
    row = Row(suffix(), [1, 2, 3, 4, 5, 6])

    def ends(*tokens: int) -> bool:
        row.state.append([row.row], [list(tokens)])
        return bool(row.drafter.ends_rest(row.state, [row.row]))

    assert not ends(1, 2) and not ends(3) and ends(4) and row.tree(2) == ([5, 6], [0, 1])
    assert not ends(9)


def test_a_long_match_in_a_finished_text_ends_a_pause() -> None:
    made = suffix(shared=True)
    first = Row(made, [30])
    first.append([1, 2, 3, 4, 5, 6])
    first.finish()
    second = Row(made, [31, 1, 2, 3])
    assert not made.ends_rest(second.state, [second.row])
    second.state.append([second.row], [[4]])
    assert made.ends_rest(second.state, [second.row])


def test_a_tree_follows_the_counts() -> None:
    """After 0 1: twice 2, once 3. After 0 1 2: 4 and 5."""
    text = [0, 1, 2, 4, 0, 1, 2, 5, 0, 1, 3, 6, 0, 1]
    made = Row(suffix(factor=1.0, min_probability=0.2), text)
    assert made.tree() == ([2, 3, 4, 5, 6], [0, 0, 1, 1, 2])
    assert Row(suffix(factor=1.0, min_probability=0.4), text).tree() == ([2], [0])
    assert made.tree(3) == ([2, 3, 4], [0, 0, 1])


def test_a_text_grows_through_propose_or_observe() -> None:
    """With or without `observe`, drafts equal those of a fresh row with the same text."""
    source = random.Random(0)
    kept, text = Row(suffix(), [1]), [1]
    for step in range(60):
        more = [source.randrange(4) for _ in range(source.randrange(1, 4))]
        text += more
        if step % 2:
            kept.append(more)
        else:
            kept.state.append([kept.row], [more])
        assert kept.tree() == Row(suffix(), text).tree()


def test_finished_texts_are_remembered_when_asked_to() -> None:
    for shared in (False, True):
        drafter = suffix(shared=shared)
        first = Row(drafter, [7, 8])
        first.append([1, 2, 3, 4, 5])
        first.finish()
        assert Row(drafter, [9, 8, 1, 2]).tree()[0] == ([3, 4, 5] if shared else [])
        assert Row(drafter, [9, 9, 8]).tree()[0] == ([1, 2] if shared else []), "with the end of the prompt as context"


def test_the_source_with_more_expected_tokens_proposes() -> None:
    drafter = suffix(shared=True)
    first = Row(drafter, [5])
    first.append([1, 2, 3, 4, 6, 7, 8])
    first.finish()
    assert Row(drafter, [2, 9, 0, 1, 2]).tree()[0] == [3, 4, 6, 7], "a match of two there, of one here"
    assert Row(drafter, [1, 2, 9, 0, 1, 2]).tree()[0] == [9, 0, 1, 2], "of two equals the row's own text"


def test_a_request_without_new_tokens_is_not_remembered() -> None:
    drafter = suffix(shared=True)
    Row(drafter, [1, 2, 3]).finish()
    assert len(drafter.memory) == 0


def test_a_preempted_text_is_remembered_once() -> None:
    """A row that leaves and returns with its tokens: only the context before new tokens counts twice."""
    drafter = suffix(shared=True)
    first = Row(drafter, [1, 2, 3])
    first.append([4, 5])
    first.finish()
    again = Row(drafter, [1, 2, 3, 4, 5])
    again.append([6, 7])
    again.finish()
    assert drafter.memory.texts == [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6, 7]], "what lay before is context"


def test_the_memory_is_loaded_and_saved(tmp_path: Path) -> None:
    place = str(tmp_path / "texts.suffix")
    drafter = suffix(store=place)
    first = Row(drafter, [5])
    first.append([1, 2, 3, 4])
    first.finish()
    assert Row(suffix(store=place), [1, 2]).tree()[0] == [3, 4]
    Path(place).write_bytes(Path(place).read_bytes()[:-70])
    with pytest.raises(ValueError, match="it was cut off"):
        suffix(store=place)
    with pytest.raises(ValueError, match="expected a file in a folder that exists"):
        suffix(store=str(tmp_path / "gone" / "texts"))


def test_a_file_that_cannot_be_written_stops_no_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    drafter = suffix(store=str(folder / "file"))
    folder.rmdir()
    for prompt in ([5], [6]):
        row = Row(drafter, prompt)
        row.append([1, 2])
        row.finish()
    assert drafter.memory.texts == [[5, 1, 2], [6, 1, 2]]
    drafter.forget()
    assert len(drafter.memory) == 0 and drafter.memory.max_tokens == 100_000
    assert caplog.text.count("cannot be written") == 1


class Letters:
    def __init__(self, shift: int) -> None:
        self.shift = shift

    def get_vocab(self) -> dict[str, int]:
        return {chr(97 + at): (at + self.shift) % 20 for at in range(20)}


def made_for(prefers: str, tokenizer: Any = None, **options: Any) -> Any:
    target = AutomatonTarget(random_logits(5, 8))
    return make_drafter("suffix", options, target=target, tokenizer=tokenizer, prefers=prefers)


def test_texts_are_shared_by_default_where_that_is_exact() -> None:
    assert made_for("coupled").memory is not None and made_for("greedy").memory is not None
    assert made_for("sampled").memory is None and made_for("sampled", shared=True).memory is not None
    assert made_for("coupled", shared=False).memory is None and suffix().memory is None


def test_a_file_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    place = str(tmp_path / "texts")
    drafter = made_for("coupled", Letters(0), store=place)
    first = Row(drafter, [5])
    first.append([1, 2])
    first.finish()
    assert made_for("sampled", Letters(0), store=place).memory.texts == [[5, 1, 2]]
    with pytest.raises(ValueError, match="its tokens are those of another tokenizer"):
        made_for("coupled", Letters(1), store=place)


def test_an_oracle_is_accepted_to_its_full_depth() -> None:
    """A target that repeats itself, and then an equal request: almost every draft is accepted."""
    logits = random_logits(12, 12, seed=3)
    params = SamplingParams(temperature=0, max_new_tokens=64)
    plain = Engine(AutomatonTarget(logits)).generate([[1, 2, 3]], params)[0].tokens
    engine = Engine(AutomatonTarget(logits), suffix(shared=True, factor=8.0))
    first = engine.generate([[1, 2, 3]], params)[0]
    second = engine.generate([[1, 2, 3]], params)[0]
    assert first.tokens == second.tokens == plain
    assert second.stats.tau > 6 and second.stats.steps <= first.stats.steps


@torch.inference_mode()
def test_misleading_texts_keep_the_output_and_cost_no_extra_pass() -> None:
    logits = random_logits(9, 8, seed=4)
    drafter = suffix(shared=True, min_match=1)
    source = random.Random(1)
    for _ in range(20):
        drafter.memory.add([source.randrange(8) for _ in range(50)])
    params = SamplingParams(temperature=1.0, seed=5, max_new_tokens=40)
    plain = Engine(AutomatonTarget(logits)).generate([[1], [2, 3]], params)
    misled = Engine(AutomatonTarget(logits), drafter).generate([[1], [2, 3]], params)
    assert [handle.tokens for handle in misled] == [handle.tokens for handle in plain]
    assert all(a.stats.steps <= b.stats.steps for a, b in zip(misled, plain, strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_draft_tokens": 0}, "num_draft_tokens, min_match: got 0, 1; expected at least 1"),
        ({"min_match": 0}, "num_draft_tokens, min_match: got 16, 0"),
        ({"factor": 0}, "factor, min_probability: got 0, 0.1; expected a finite number above 0, and 0 to 1"),
        ({"factor": float("nan")}, "factor, min_probability: got nan"),
        ({"factor": float("inf")}, "factor, min_probability: got inf"),
        ({"min_probability": 1.5}, "factor, min_probability: got 2.0, 1.5"),
        ({"max_tokens": 0}, "max_tokens: got 0; expected at least 1"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"suffix {message}"):
        suffix(**options)


def test_shared_is_true_or_false() -> None:
    with pytest.raises(ValueError, match="suffix shared: got 'maybe'; expected true or false"):
        suffix(shared="maybe")
