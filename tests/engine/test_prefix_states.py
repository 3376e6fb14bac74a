"""Prefix sharing with drafters that read hidden states of prompts: they get those of shared tokens too."""

from __future__ import annotations

from typing import Any

import pytest
from engine.test_prefix_sharing import PROMPT, SIZE, alone, head, params, target

from specdec_fast import Engine, get_drafter


def states_of(engine: Engine) -> list[list[int]]:
    """Records the states of the automaton that the drafter gets for prompts, one list for each call."""
    found: list[list[int]] = []
    begin = engine.drafter.begin  # type: ignore[union-attr]

    def recorded(view: Any, rows: Any, output: Any) -> None:
        states = next(iter(output.aux_hidden_states.values())).argmax(1).tolist() if output is not None else []
        skipped = output.num_shared if output is not None and output.num_shared else [0] * len(rows)
        want = [
            [engine.target.state_after(view.tokens(row)[: at + 1]) for at in range(view.length(row) - 1)]
            for row in rows
        ]
        assert states == [state for own, count in zip(want, skipped) for state in own[count:]]
        found.append(states)
        begin(view, rows, output)

    engine.drafter.begin = recorded  # type: ignore[method-assign, union-attr]
    return found


@pytest.mark.parametrize("prompts", [[PROMPT], [PROMPT, [1], PROMPT, [2, 2]], [[1], PROMPT[:9], PROMPT[:9]]])
def test_heads_get_the_hidden_states_of_shared_tokens(prompts: list[list[int]]) -> None:
    """The automaton's hidden states show its state after every token."""
    engine = Engine(target(), head("eagle3"))
    found = states_of(engine)
    for seed in (1, 2):
        handles = engine.generate(prompts, params(seed, 12))
        assert [handle.tokens for handle in handles] == [alone(prompt, params(seed, 12)) for prompt in prompts]
    assert sum(map(len, found)) == 2 * sum(len(prompt) - 1 for prompt in prompts)
    assert engine.target.cache.pages.num_hits > 0 and engine.stats.faults == 0
    assert engine.stats.num_accepted > 0


def test_states_of_a_failing_batch_are_those_of_its_rows(faults: list[str]) -> None:
    """A drafter that raises gets its rows one by one, with the states of shared tokens."""
    engine = Engine(target(), head("eagle3"))
    engine.generate([PROMPT], params(1))
    inner = engine.drafter.source.begin  # type: ignore[union-attr]

    def refusing(view: Any, rows: Any, output: Any) -> None:
        if len(rows) > 1:
            raise RuntimeError("too many")
        inner(view, rows, output)

    engine.drafter.source.begin = refusing  # type: ignore[union-attr]
    found = states_of(engine)
    handles = engine.generate([[*PROMPT, 1], [2, 3], [*PROMPT, 4]], params(2))
    assert [len(states) for states in found] == [23, 11, 1, 11] and len(faults) == 0
    assert all(handle.stats.num_draft_tokens for handle in handles)


def test_answers_are_shared_in_the_turn_after_next_with_heads() -> None:
    """Generated tokens have no hidden states in the cache, but those of the next prompt, which contains them, have."""
    engine, history, shared = Engine(target(), head("eagle")), list(PROMPT), []
    for turn in range(3):
        (handle,) = engine.generate([history], params(turn, 20))
        shared.append(handle.stats.cached_tokens)
        history = [*history, *handle.tokens, turn]
    assert shared == [0, 8, (11 + 21 - 1) // SIZE * SIZE]


def test_a_shared_table_of_recycling_learns_each_prompt_once() -> None:
    engine = Engine(target(), _recycling(shared=True))
    found = states_of(engine)
    for seed in (1, 2):
        engine.generate([PROMPT], params(seed))
    assert list(map(len, found)) == [10, 2]
    engine = Engine(target(), _recycling(shared=False))
    found = states_of(engine)
    for seed in (1, 2):
        engine.generate([PROMPT], params(seed))
    assert list(map(len, found)) == [10, 10]


def _recycling(shared: bool) -> Any:
    made = get_drafter("recycling")(top_k=4, shared=shared)
    made.read_prompts(target().lm_head)
    return made
