"""Drafts of a drafter with a head over an automaton, without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from oracles.automaton import AutomatonTarget, random_logits
from specdec_fast import SamplingParams
from specdec_fast.draft import Draft
from specdec_fast.interfaces import Budget, TargetOutput
from specdec_fast.state import DecodeState


def automaton(seed: int = 4, vocab: int = 8, **shape: Any) -> AutomatonTarget:
    return AutomatonTarget(random_logits(23, vocab, seed=seed), **shape)


@torch.inference_mode()
def proposed(made: Any, target: AutomatonTarget, texts: Sequence[Sequence[int]], nodes: int, **params: Any) -> Draft:
    """What a drafter proposes for rows that begin with these texts."""
    state = DecodeState(8, 64)
    rows = [state.join(list(text), SamplingParams(seed=at, **params), len(text), ()) for at, text in enumerate(texts)]
    states = [target.state_after(text[: at + 1]) for text in texts for at in range(len(text) - 1)]
    made.begin(state, rows, TargetOutput(None, {"final_norm": torch.eye(len(target.table))[states]}))
    draft: Draft = made.propose(state, rows, Budget([nodes] * len(rows)), state.rng(rows))
    return draft
