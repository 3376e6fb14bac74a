"""Which hidden states a head was trained on, told by its acceptance: producers count a target's layers in two ways.

The numbers in a head's config.json mean inputs of layers to some and outputs to others, and one that is read the wrong
way drafts worse without any error. What is accepted of it on a text says which it is.
Tests: tests/draft_runners/test_head_input_layers.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specdec_fast.core.chain_layout import chain_layout

ENOUGH, MOST = 16, 256  # tokens of text


@torch.no_grad()
def layer_acceptance(model: Any, target: Any, tokens: Sequence[int]) -> dict[tuple[int, ...], float]:
    """Acceptance rate by the layers whose inputs a head reads: as it was opened, and one layer before and behind.

    model: a `PagedHead` that reads "entering:i" of `target`, both without rows; tokens: a text, 16 to 256 of which are
    used. The rate is that of a head's first token, drawn and verified at temperature 1: the mean sum of min(p, q).

    Raises ValueError for a head that reads no layers by number, and for a text that is too short.
    """
    told = [name.partition(":")[2] for name in model.aux_hidden_states if name.startswith("entering:")]
    if len(told) != len(model.aux_hidden_states) or not told:
        raise ValueError(
            f"layers: got a head that reads {', '.join(model.aux_hidden_states)}; expected one that reads layers "
            f"(EAGLE-3)"
        )
    text = list(tokens[: min(MOST, target.max_length)])
    if len(text) < ENOUGH:
        raise ValueError(f"layers: got a text of {len(text)} tokens; expected at least {ENOUGH} to tell layers by")
    shifts = [[int(index) + shift for index in told] for shift in (0, -1, 1)]
    choices = [tuple(ids) for ids in shifts if min(ids) >= 0 and max(ids) < target.num_layers]
    shape = chain_layout((0,), (len(text),), target.device)
    fed = torch.tensor(text, dtype=torch.int64).to(target.device)
    names = sorted({f"entering:{index}" for ids in choices for index in ids})
    _reserve(target.cache, len(text))
    try:
        places = torch.arange(1, len(text)).to(target.device)
        output = target.extend(shape.rows, fed, shape.offsets, logits=places, aux_hidden_states=names)
    finally:
        target.cache.release([0])
    dist = output.logits.float().softmax(-1)
    aux_hidden_states = model.aux_hidden_states
    try:
        return {ids: _rate(model, ids, output.aux_hidden_states, fed, dist) for ids in choices}
    finally:
        model.aux_hidden_states = aux_hidden_states


def choose_layers(model: Any, target: Any, tokens: Sequence[int]) -> dict[tuple[int, ...], float]:
    """Make a head read the layers with which it is accepted most. All rates, those it was opened with first."""
    rates = layer_acceptance(model, target, tokens)
    best = max(rates, key=lambda ids: rates[ids])
    model.aux_hidden_states = model.head.aux_hidden_states = tuple(f"entering:{index}" for index in best)
    return rates


def _reserve(cache: Any, length: int) -> None:
    if not cache.reserve(0, length):
        raise ValueError(
            f"layers: got a pool of {cache.pages.num_free} free pages; expected {cache.pages_for(length)}, for "
            f"{length} tokens of text; raise num_pages or pass a shorter text"
        )


def _rate(model: Any, ids: Sequence[int], aux_hidden_states: dict[str, Tensor], fed: Tensor, dist: Tensor) -> float:
    model.aux_hidden_states = tuple(f"entering:{index}" for index in ids)
    features = model.features(aux_hidden_states)
    shape = chain_layout((0,), (len(fed) - 1,), fed.device)
    _reserve(model.cache, len(fed))
    try:
        logits = model.logits(model.extend(shape.rows, fed[1:], features[:-1], shape.offsets)).float()
    finally:
        model.cache.release([0])
    known = dist if model.token_ids is None else dist[:, model.token_ids]
    return float(torch.minimum(known, logits.softmax(-1)[:, : known.shape[1]]).sum(-1).mean())
