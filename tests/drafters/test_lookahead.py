"""Lookahead: the window's tree, the pool, short budgets, and texts over a grid of sizes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from oracles import models
from oracles.automaton import AutomatonTarget, random_logits, scripted

from specdec_fast import Engine, SamplingParams, get_drafter
from specdec_fast.core.draft import Draft
from specdec_fast.engine.state import DecodeState
from specdec_fast.interfaces import Budget

VOCAB = 8
PROMPT = [1, 2, 5, 1, 2, 6, 3]


def target(**shape: Any) -> AutomatonTarget:
    return AutomatonTarget(random_logits(23, VOCAB, seed=2), **{"max_length": 128, **shape})


def drafter(window: int, ngram: int, guesses: int, **options: Any) -> Any:
    return get_drafter("lookahead")(window=window, ngram=ngram, guesses=guesses, **options)


def plain(temperature: float, length: int) -> list[int]:
    params = SamplingParams(temperature=temperature, seed=5, max_new_tokens=length)
    return Engine(target()).generate([PROMPT], params)[0].tokens


def path(draft: Draft, node: int) -> list[int]:
    """Returns the tokens from the root down to a node of the only row."""
    found = []
    while node >= 0:
        found.append(int(draft.tokens[node]))
        node = int(draft.parents[node])
    return found[::-1]


GRID = [(1, 2, 0), (1, 2, 1), (5, 2, 3), (1, 5, 2), (4, 3, 0), (7, 5, 7), (3, 7, 4), (2, 3, 60)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("window", "ngram", "guesses"), GRID)
def test_every_size_gives_the_text_of_plain_decoding(window: int, ngram: int, guesses: int, temperature: float) -> None:
    engine = Engine(target(), drafter(window, ngram, guesses))
    params = SamplingParams(temperature=temperature, seed=5, max_new_tokens=40)
    handle = engine.generate([PROMPT], params)[0]
    assert handle.tokens == plain(temperature, 40) and handle.stats.steps <= 40
    assert handle.stats.steps < 40 or guesses < 2 or temperature


def watched(made: Any, engine: Engine, temperature: float, length: int, see: Any) -> Any:
    """Runs one request, and calls `see(draft, acceptance, text before)` after each step."""
    handle = engine.submit(PROMPT, SamplingParams(temperature=temperature, seed=5, max_new_tokens=length))
    observe = made.observe

    def spy(view: Any, draft: Draft, acceptance: Any, output: Any) -> None:
        emitted = int(acceptance.num_accepted[0]) + 1
        text = list(view.tokens(0))[: view.length(0)]
        observe(view, draft, acceptance, output)
        see(draft, acceptance, output, text, emitted)

    made.observe = spy
    while not handle.finished:
        engine.step()
    return handle


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_window_and_pool_equal_a_replay_with_explicit_prefixes(temperature: float) -> None:
    """The published window, token by token: the token at (row, column) follows its diagonal history, by a target
    without a cache. The pool holds the newest G n-grams of each token.
    """
    window, ngram, guesses, model = 4, 4, 2, target()
    made = drafter(window, ngram, guesses, pool_from_prompt=False)
    pool: dict[int, list[tuple[int, ...]]] = {}
    rows: list[list[int]] = []
    full = [0]

    def see(draft: Draft, acceptance: Any, output: Any, text: list[int], emitted: int) -> None:
        nonlocal rows
        before = text[: len(text) - emitted]
        root = before[-1]
        assert int(draft.tokens[0]) == root
        if draft.score_only is None:
            return
        score_only = [node for node in range(draft.num_nodes) if bool(draft.score_only[node])]
        # every node's choice is the target's after the tokens on its path
        for node in range(draft.num_nodes):
            prefix = before[:-1] + path(draft, node)
            assert torch.allclose(output.logits[node], model.table[model.state_after(prefix)])
        height = len(rows)
        if len(score_only) != height * len(rows[0]) - 1:  # the end of the text: the window is narrower
            return
        full[0] += height == ngram - 1
        window_rows = [[root, *rows[0][1:]], *rows[1:]]

        def choice_at(row: int, column: int) -> int:
            history = window_rows[0][: column + 1] + [window_rows[each][column] for each in range(1, row + 1)]
            at = next(node for node in [0, *score_only] if path(draft, node) == history)
            assert len(before) - 1 + len(history) - 1 == len(before) - 1 + row + column
            return int(acceptance.node_choice[at])

        fresh = [choice_at(height - 1, column) for column in range(len(rows[0]))]
        if height < ngram - 1:
            rows = [each[1:] for each in (*window_rows, fresh)]
        else:
            for column in range(window):
                known = pool.setdefault(window_rows[0][column], [])
                gram = tuple(each[column] for each in (*window_rows[1:], fresh))
                if gram in known:
                    known.remove(gram)
                known.append(gram)
                del known[:-guesses]
            rows = [*window_rows[1:], fresh]
        assert made._rows[0].rows == rows
        assert {key: list(value) for key, value in made._rows[0].pool.items()} == pool

    engine = Engine(model, made)
    begin = made.begin

    def begun(view: Any, some: Any, output: Any) -> None:
        nonlocal rows
        begin(view, some, output)
        rows = [list(row) for row in made._rows[0].rows]
        assert [len(row) for row in rows] == [window + ngram - 2] and set(rows[0]) <= set(PROMPT)

    made.begin = begun
    handle = watched(made, engine, temperature, 60, see)
    assert handle.tokens == plain(temperature, 60) and full[0] > 20


def test_a_guess_sees_the_root_and_itself_and_the_window_its_diagonal() -> None:
    made = drafter(3, 4, 2, pool_from_prompt=False)
    state = DecodeState(1, 64)
    row = state.join([4, 7], SamplingParams(seed=1), 2, ())
    made.begin(state, [row], None)
    mine = made._rows[row]
    mine.rows = [[-1, 1, 2], [3, 4, 5], [6, 0, 1]]
    mine.pool = {7: {(5, 5, 5): None, (5, 5, 6): None}}
    draft = made.propose(state, [row], Budget([made.num_draft_tokens]), state.rng([row]))
    draft.check(VOCAB)
    assert draft.score_only is not None
    accepted = [path(draft, node) for node in range(1, draft.num_nodes) if not draft.score_only[node]]
    assert accepted == [[7, 5], [7, 5, 5], [7, 5, 5, 6], [7, 5, 5, 5]], "newest first, beginnings shared"
    seen = [path(draft, node) for node in range(draft.num_nodes) if draft.score_only[node]]
    assert seen == [
        [7, 1], [7, 1, 2],
        [7, 3], [7, 1, 4], [7, 1, 2, 5],
        [7, 3, 6], [7, 1, 4, 0], [7, 1, 2, 5, 1],
    ]  # fmt: skip


def test_short_budgets_take_guesses_first_and_then_whole_columns() -> None:
    made = drafter(3, 4, 2, pool_from_prompt=False)
    state = DecodeState(1, 64)
    row = state.join([4, 7], SamplingParams(seed=1), 2, ())
    made.begin(state, [row], None)
    made._rows[row].rows = [[-1, 1, 2], [3, 4, 5], [6, 0, 1]]
    made._rows[row].pool = {7: {(5, 5, 5): None, (5, 5, 6): None}}
    sizes = {}
    for limit in range(14):
        draft = made.propose(state, [row], Budget([limit]), state.rng([row]))
        score_only = 0 if draft.score_only is None else int(draft.score_only.sum())
        sizes[limit] = (draft.num_nodes - 1 - score_only, score_only)
    guesses = [0, 1, 2, 3, *[4] * 10]
    columns = [0, 0, 0, 0, 0, 0, 2, 2, 2, 5, 5, 5, 8, 8]
    assert sizes == dict(enumerate(zip(guesses, columns, strict=True)))


def test_wrong_n_grams_in_the_pool_do_not_change_the_text() -> None:
    source = random.Random(4)
    for temperature in (0.0, 1.0):
        made = drafter(3, 4, 5)
        engine = Engine(target(), made)
        handle = engine.submit(PROMPT, SamplingParams(temperature=temperature, seed=5, max_new_tokens=40))
        while not handle.finished:
            engine.step()
            for state in made._rows.values():
                for _ in range(30):
                    made._add_ngram(state, tuple(source.randrange(VOCAB) for _ in range(4)))
        assert handle.tokens == plain(temperature, 40) and handle.stats.steps <= 40


def test_n_grams_of_prompt_and_text_enter_the_pool_once_and_only_their_own_row() -> None:
    made = drafter(2, 3, 2)
    state = DecodeState(2, 64)
    rows = [state.join(text, SamplingParams(seed=1), len(text), ()) for text in ([1, 2, 3, 1, 2, 4, 1, 2, 5, 1], [6])]
    made.begin(state, rows, None)
    draft = made.propose(state, rows, Budget([2, 2]), state.rng(rows))
    mine = made._rows[rows[0]].pool
    assert list(mine[1]) == [(2, 4), (2, 5)] and list(mine[2]) == [(4, 1), (5, 1)] and made._rows[rows[1]].pool == {}
    assert draft.tokens.tolist() == [1, 2, 5, 6, *draft.tokens.tolist()[4:]]
    state.append([rows[0]], [[2, 4]])
    made.propose(state, rows, Budget([2, 2]), state.rng(rows))
    assert list(mine[1]) == [(2, 5), (2, 4)], "seen again: the newest"
    made.release(rows)
    assert made._rows == {}


def test_it_speeds_up_a_text_that_repeats() -> None:
    """A window alone finds future tokens if choices depend on positions; the pool finds earlier n-grams."""
    script = [1, 4, 2, 5, 7, 6, 0, 3] * 6
    for options in ({"pool_from_prompt": True}, {"pool_from_prompt": False}):
        made = drafter(6, 4, 6, **options)
        engine = Engine(scripted(script, VOCAB, max_rows=1, max_length=64), made)
        handle = engine.generate([[1]], SamplingParams(temperature=0, max_new_tokens=40))[0]
        assert handle.tokens == script[1:41] and handle.stats.steps <= 30


@pytest.mark.parametrize("ngram", [2, 3, 5])
def test_a_text_that_repeats_its_prompt_costs_one_pass_for_each_full_guess(ngram: int) -> None:
    """With n-grams of the prompt all tokens are accepted: N tokens a pass, over three times the period."""
    script = [1, 4, 2, 5, 7, 6, 0, 3] * 5
    engine = Engine(scripted(script, VOCAB, max_rows=1, max_length=64), drafter(2, ngram, 1))
    handle = engine.generate([script[:12]], SamplingParams(temperature=0, max_new_tokens=24))[0]
    assert handle.tokens == script[12:36] and handle.stats.steps == -(-24 // ngram)


def test_rules_without_choices_use_the_arg_max() -> None:
    made = drafter(4, 3, 4)
    engine = Engine(target(), made, rule="traversal")
    checked = 0

    def see(draft: Draft, acceptance: Any, output: Any, text: list[int], emitted: int) -> None:
        nonlocal checked
        if acceptance.node_choice is None and draft.score_only is not None and made._rows:
            fresh = made._rows[0].rows[-1]
            wide = [int(token) for token in output.logits.argmax(1)[draft.score_only]]
            checked += fresh[-1] == wide[-1]

    handle = watched(made, engine, 1.0, 30, see)
    assert handle.error is None and checked > 10


def test_a_second_request_on_the_same_row_starts_anew() -> None:
    made, params = drafter(5, 4, 5), SamplingParams(temperature=0, max_new_tokens=30)
    engine = Engine(target(), made)
    first, second = (engine.generate([PROMPT], params)[0] for _ in range(2))
    assert first.tokens == second.tokens and first.stats.steps == second.stats.steps


def test_over_a_transformers_model_with_a_window_of_attention() -> None:
    for family in ("llama", "mistral"):
        engine = Engine(models.target(family), drafter(3, 3, 3))
        handles = engine.generate(
            [models.prompt(40), models.prompt(5)], SamplingParams(temperature=0, max_new_tokens=16)
        )
        assert [handle.tokens for handle in handles] == [models.greedy_text(family, n, 16) for n in (40, 5)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "lookahead window: got 0; expected a whole number of at least 1"),
        ({"ngram": 1}, "lookahead ngram: got 1; expected a whole number of at least 2"),
        ({"guesses": -1}, "lookahead guesses: got -1; expected a whole number of at least 0"),
        ({"window": "7"}, "lookahead window: got '7'"),
        ({"num_draft_tokens": 0}, "lookahead num_draft_tokens: got 0; expected at least 1"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_drafter("lookahead")(**options)
