"""Retrieval drafters order continuations by each request's Gumbel noise, at each depth, below each parent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec_fast import SamplingParams, get_drafter
from specdec_fast.core.draft import Draft
from specdec_fast.engine.state import DecodeState
from specdec_fast.interfaces import Acceptance, Budget, TargetOutput
from specdec_fast.retrieval.datastore import Datastore, build
from specdec_kernels.random import replay_noise

VOCAB, FIRST = 99, (2, 3, 4, 5)


def below(token: int) -> tuple[int, int]:
    """Continuations of each of the first tokens, equally often."""
    return 18 + token, 22 + token


PIECES = [[1, token, own] for token in FIRST for own in below(token)]


def recycling(folder: Path) -> Any:
    made = get_drafter("recycling")(pick="coupled", min_probability=0.0, shared=True)
    logits = torch.full((1 + len(FIRST), VOCAB), float("-inf"))
    logits[0, list(FIRST)] = 0.0
    for row, token in enumerate(FIRST, 1):
        logits[row, list(below(token))] = 0.0
    made.observe(None, Draft.chains([0], [[1, *FIRST]]), Acceptance(*[torch.zeros(0)] * 3), TargetOutput(logits))
    return made


def suffix(folder: Path) -> Any:
    return get_drafter("suffix")(pick="coupled", min_probability=0.0)


def suffix_of_others(folder: Path) -> Any:
    made = get_drafter("suffix")(pick="coupled", min_probability=0.0, shared=True)
    for piece in PIECES:
        made.memory.add(piece)
    return made


def rest(folder: Path) -> Any:
    build(folder / "store", PIECES, VOCAB)
    return get_drafter("rest")(
        pick="coupled", min_probability=0.0, min_match=1, datastore=Datastore(folder / "store"), num_draft_tokens=12
    )


def text(row: int, whole: bool) -> list[int]:
    """Returns a text of another length for every row. Every piece follows its own token."""
    filler = iter(range(40, VOCAB))
    pieces = [token for piece in PIECES for token in (next(filler), *piece)] if whole else []
    return [next(filler) for _ in range(1 + 3 * row)] + pieces + [next(filler), 1]


@torch.inference_mode()
@pytest.mark.parametrize("make", [recycling, suffix, suffix_of_others, rest])
def test_each_row_uses_its_own_noise_at_every_depth(make: Callable[[Path], Any], tmp_path: Path) -> None:
    made, state = make(tmp_path), DecodeState(4, 128)
    for batch in range(8):
        seeds, texts = [10 * batch + at for at in range(4)], [text(at, make is suffix) for at in range(4)]
        rows = [state.join(own, SamplingParams(seed=seed), len(own), ()) for own, seed in zip(texts, seeds)]
        made.begin(state, rows, None)
        draft = made.propose(state, rows, Budget([12] * 4), state.rng(rows))
        offsets = draft.offsets.tolist()
        for at, (own, seed) in enumerate(zip(texts, seeds, strict=True)):
            tokens, parents = (part[offsets[at] : offsets[at + 1]].tolist() for part in (draft.tokens, draft.parents))
            noise = [replay_noise(torch.tensor([seed]), torch.tensor([len(own) + more]), VOCAB)[0] for more in (0, 1)]
            by_noise = sorted(FIRST, key=lambda token: -float(noise[0][token]))
            assert [token for token, parent in zip(tokens, parents) if parent == 0] == by_noise
            for node, parent in enumerate(parents):
                if parent == 0:
                    found = [token for token, above in zip(tokens, parents) if above == node]
                    assert found == sorted(below(tokens[node]), key=lambda token: -float(noise[1][token]))
        made.release(rows)
        for row in rows:
            state.leave(row)


@torch.inference_mode()
@pytest.mark.parametrize("name", ["recycling", "suffix"])
def test_a_reused_row_has_no_data_of_the_text_before(name: str) -> None:
    """An evicted request starts again, and its row may have served another text meanwhile."""
    made, state = get_drafter(name)(), DecodeState(1, 64)
    for own, want in (([5, 6, 7, 5], [5, 6, 7]), ([6, 8, 9, 8, 5], [5])):
        row = state.join(own, SamplingParams(seed=1, temperature=0.0), len(own), ())
        made.begin(state, [row], None)
        if name == "recycling" and len(want) > 1:
            logits = torch.full((2, VOCAB), float("-inf"))
            logits[0, 6] = logits[1, 7] = 0.0
            seen = Draft.chains([row], [[5, 6]])
            made.observe(state, seen, Acceptance(*[torch.zeros(0)] * 3), TargetOutput(logits))
        draft = made.propose(state, [row], Budget([2]), state.rng([row]))
        assert draft.tokens.tolist() == want
        made.release([row])
        state.leave(row)
