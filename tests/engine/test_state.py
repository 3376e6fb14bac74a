"""DecodeState: rows join and leave, tokens grow, randomness is keyed by absolute positions."""

from __future__ import annotations

import random

import torch

from specdec_fast.core.draft import Draft
from specdec_fast.engine.state import DecodeState
from specdec_fast.interfaces import Acceptance
from specdec_fast.sampling.params import SamplingParams


def params(seed: int = 1, **changes: object) -> SamplingParams:
    return SamplingParams(seed=seed, **changes)


def test_rows_are_given_and_taken_back() -> None:
    state = DecodeState(3, 16)
    rows = [state.join([1, 2, index], params(), 3 - index, ()) for index in range(3)]
    assert [state.prompt_length(row) for row in rows] == [3, 2, 1] and [state.length(row) for row in rows] == [3] * 3
    assert sorted(rows) == [0, 1, 2] and state.num_free == 0
    state.leave(rows[1])
    assert state.num_free == 1 and state.length(rows[1]) == 0
    assert state.join([7], params(), 1, ()) == rows[1]
    assert list(state.tokens(rows[1])) == [7] and list(state.tokens(rows[2])) == [1, 2, 2]


def test_tokens_are_appended_to_their_rows() -> None:
    state = DecodeState(4, 16)
    one, two = state.join([1], params(), 1, ()), state.join([2, 3], params(), 2, ())
    state.append([two, one], [[5, 6, 7], []])
    assert list(state.tokens(two)) == [2, 3, 5, 6, 7] and list(state.tokens(one)) == [1]


def test_a_joined_row_does_not_share_the_callers_list() -> None:
    state, prompt = DecodeState(1, 16), [1, 2]
    state.append([state.join(prompt, params(), 2, ())], [[3]])
    assert prompt == [1, 2]


def test_root_positions_are_absolute_and_seeds_follow_the_row() -> None:
    state = DecodeState(4, 16)
    one = state.join([1, 2, 3], params(11), 3, ())
    two = state.join([4], params(22), 1, ())
    state.append([one], [[9, 9]])
    rng = state.rng([two, one])
    assert rng.positions.tolist() == [0, 4] and rng.seeds.tolist() == [22, 11]
    assert rng.positions.dtype == torch.int32 and rng.seeds.dtype == torch.int64


def test_the_largest_seed_survives() -> None:
    state = DecodeState(1, 4)
    row = state.join([1], params(2**63 - 1), 1, ())
    assert state.rng([row]).seeds.tolist() == [2**63 - 1]


def test_read_joins_the_accepted_path_and_the_next_token() -> None:
    draft = Draft.trees([0, 1], [([9, 1, 2, 3], [-1, 0, 0, 2]), ([8, 4], [-1, 0])])
    acceptance = Acceptance(
        torch.tensor([[0, 2, 3], [4, -1, -1]], dtype=torch.int32),
        torch.tensor([2, 0], dtype=torch.int32),
        torch.tensor([7, 6]),
    )
    assert DecodeState.read_emitted_tokens(draft, acceptance) == [([2, 3, 7], 2), ([6], 0)]


def test_the_device_side_mirrors_the_host_when_published() -> None:
    source, state = random.Random(0), DecodeState(4, 32)
    held: dict[int, list[int]] = {}
    for _ in range(60):
        if held and source.random() < 0.3:
            row = source.choice(list(held))
            state.leave(row)
            del held[row]
        elif state.num_free:
            tokens = [source.randrange(50) for _ in range(source.randrange(1, 5))]
            held[state.join(tokens, params(), len(tokens), ())] = tokens
        for row, tokens in held.items():
            more = [source.randrange(50) for _ in range(source.randrange(2))]
            if len(tokens) + len(more) <= 32:
                state.append([row], [more])
                tokens.extend(more)
        state.publish(list(held))
        for row in range(4):
            tokens = held.get(row, [])
            assert state.device_tokens[row, : len(tokens)].tolist() == tokens == list(state.tokens(row))
            assert int(state.lengths[row]) == len(tokens) and bool(state.done[row]) == (row not in held)


def test_sampling_is_packed_in_the_order_asked_for() -> None:
    state = DecodeState(3, 8)
    rows = [state.join([1], params(temperature=t, top_k=k), 1, (5,)) for t, k in ((0.0, 0), (0.5, 3), (1.5, 9))]
    packed = state.sampling([rows[2], rows[0]])
    assert packed.temperature.tolist() == [1.5, 0.0] and packed.top_k.tolist() == [9, 0]
    state.leave(rows[0])
    again = state.join([1], params(temperature=0.25), 1, ())
    assert state.sampling([rows[2], again]).temperature.tolist() == [1.5, 0.25]
