"""Drafters over an automaton without an engine: rows join and steps run as in an engine."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from oracles.automaton import AutomatonTarget, random_logits
from specdec_fast import SamplingParams
from specdec_fast.core.draft import Draft
from specdec_fast.engine.state import DecodeState
from specdec_fast.interfaces import Acceptance, Budget, TargetOutput


def automaton(seed: int = 4, vocab: int = 8, **shape: Any) -> AutomatonTarget:
    return AutomatonTarget(random_logits(23, vocab, seed=seed), **shape)


@torch.inference_mode()
def begin(made: Any, target: AutomatonTarget, state: DecodeState, rows: Sequence[int]) -> None:
    """Adds rows, with the hidden states that the drafter needs of all tokens but the roots."""
    texts = [state.tokens(row)[:-1] for row in rows]
    states = [target.state_after(text[: at + 1]) for text in texts for at in range(len(text))]
    aux_hidden_states = target._aux_hidden_states(
        (*made.needs.aux_hidden_states, *made.needs.prompt_aux_hidden_states), torch.tensor(states, dtype=torch.int64)
    )
    made.begin(state, rows, TargetOutput(None, aux_hidden_states) if aux_hidden_states and states else None)


@torch.inference_mode()
def proposed(made: Any, target: AutomatonTarget, texts: Sequence[Sequence[int]], nodes: int, **params: Any) -> Draft:
    """Returns a drafter's proposals for rows that begin with these texts."""
    state = DecodeState(8, 64)
    rows = [state.join(list(text), SamplingParams(seed=at, **params), len(text), ()) for at, text in enumerate(texts)]
    begin(made, target, state, rows)
    draft: Draft = made.propose(state, rows, Budget([nodes] * len(rows)), state.rng(rows))
    return draft


@torch.inference_mode()
def commit(made: Any, target: AutomatonTarget, state: DecodeState, draft: Draft, source: random.Random) -> None:
    """Commits any path of each tree and a token after it; the drafter observes the target's results for each node."""
    tokens, parents, offsets = draft.tokens.tolist(), draft.parents.tolist(), draft.offsets.tolist()
    score_only = [False] * len(tokens) if draft.score_only is None else draft.score_only.tolist()
    rows = draft.rows.tolist()
    states: list[int] = []
    paths: list[list[int]] = []
    for row, start, stop in zip(rows, offsets, offsets[1:]):
        before = target.state_after(state.tokens(row)[:-1])
        for node in range(start, stop):
            above = before if parents[node] < 0 else states[start + parents[node]]
            states.append(int(target.transitions[above, tokens[node]]))
        path = [start]
        while source.random() < 0.7:
            below = [at for at in range(start + 1, stop) if start + parents[at] == path[-1] and not score_only[at]]
            if not below:
                break
            path.append(source.choice(below))
        paths.append(path)
    following = [source.randrange(target.vocab_size) for _ in rows]
    width, logits = max(map(len, paths)), target.table[states]
    acceptance = Acceptance(
        path=torch.tensor([[*path, *[-1] * (width - len(path))] for path in paths], dtype=torch.int32),
        num_accepted=torch.tensor([len(path) - 1 for path in paths], dtype=torch.int32),
        next_token=torch.tensor(following),
        node_choice=logits.argmax(1),
    )
    state.append(rows, [[*(tokens[at] for at in path[1:]), last] for path, last in zip(paths, following)])
    made.observe(
        state,
        draft,
        acceptance,
        TargetOutput(logits, target._aux_hidden_states(made.needs.aux_hidden_states, torch.tensor(states))),
    )
