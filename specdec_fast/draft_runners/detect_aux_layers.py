"""Finds the hidden states that an EAGLE-3 head was trained on, by its acceptance on a text.

Layer numbers in config.json mean inputs of layers to some producers and outputs to others. A head that reads the wrong
ones drafts worse without any error. Tests: tests/draft_runners/test_detect_aux_layers.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from specdec_fast.core.chain_layout import chain_layout
from specdec_fast.core.confidence import Interval, difference_interval

MIN_TOKENS, MAX_TOKENS = 16, 256


@torch.no_grad()
def layer_acceptances(model: Any, target: Any, tokens: Sequence[int]) -> dict[tuple[int, ...], list[float]]:
    """Measures the acceptance of a head for three choices of layers: as loaded, one layer earlier, one layer later.

    The rate at a place is that of the head's first token, sampled and verified at temperature 1: sum min(p, q).

    Args:
        model: A `PagedHead` that reads "entering:i" of the target. Neither may have rows.
        target: The target.
        tokens: A text, of which 16 to 256 tokens are used.

    Returns:
        Acceptance rate at each place of the text, by layers; those as loaded first.

    Raises:
        ValueError: If the head reads no layers by number, or if the text is too short.
    """
    numbers = [name.partition(":")[2] for name in model.aux_hidden_states if name.startswith("entering:")]
    if len(numbers) != len(model.aux_hidden_states) or not numbers:
        raise ValueError(
            f"layers: got a head that reads {', '.join(model.aux_hidden_states)}; expected one that reads layers "
            f"(EAGLE-3)"
        )
    text = list(tokens[: min(MAX_TOKENS, target.max_length)])
    if len(text) < MIN_TOKENS:
        raise ValueError(f"layers: got a text of {len(text)} tokens; expected at least {MIN_TOKENS} to compare layers")
    shifts = [[int(index) + shift for index in numbers] for shift in (0, -1, 1)]
    choices = [tuple(ids) for ids in shifts if min(ids) >= 0 and max(ids) <= target.num_layers]
    shape = chain_layout((0,), (len(text),), target.device)
    fed = torch.tensor(text, dtype=torch.int64).to(target.device)
    names = sorted({f"entering:{index}" for ids in choices for index in ids})
    _reserve_pages(target.cache, len(text))
    try:
        places = torch.arange(1, len(text)).to(target.device)
        output = target.extend(shape.rows, fed, shape.offsets, logits=places, aux_hidden_states=names)
    finally:
        target.cache.release([0])
    dist = output.logits.float().softmax(-1)
    aux_hidden_states = model.aux_hidden_states
    try:
        return {ids: _acceptance_rates(model, ids, output.aux_hidden_states, fed, dist) for ids in choices}
    finally:
        model.aux_hidden_states = aux_hidden_states


def mean_rates(rates: Mapping[tuple[int, ...], Sequence[float]]) -> dict[tuple[int, ...], float]:
    """Returns the mean rate of each choice of layers."""
    return {ids: fmean(values) for ids, values in rates.items()}


def best_layers(rates: Mapping[tuple[int, ...], Sequence[float]]) -> tuple[tuple[int, ...], Interval | None]:
    """Chooses the layers with the best acceptance.

    Args:
        rates: Result of `layer_acceptances`.

    Returns:
        The layers, and the interval of their gain over the layers as loaded. Layers as loaded stay if no other choice
        is better beyond the noise; the interval is then that of the best other choice, None if there is none.
    """
    (loaded, own), *others = rates.items()
    if not others:
        return loaded, None
    best, values = max(others, key=lambda entry: fmean(entry[1]))
    gain = difference_interval(values, own)
    return (best if gain.low > 0 else loaded), gain


def choose_layers(model: Any, target: Any, tokens: Sequence[int]) -> dict[tuple[int, ...], float]:
    """Makes a head read the layers with the best acceptance, as `best_layers` chooses them.

    Args:
        model: A `PagedHead`.
        target: The target.
        tokens: A text.

    Returns:
        All rates, those as loaded first.
    """
    rates = layer_acceptances(model, target, tokens)
    best, _ = best_layers(rates)
    model.aux_hidden_states = model.head.aux_hidden_states = tuple(f"entering:{index}" for index in best)
    return mean_rates(rates)


def _reserve_pages(cache: Any, length: int) -> None:
    """Reserves row 0 for the text. Raises ValueError if the pool is too small."""
    if not cache.reserve(0, length):
        raise ValueError(
            f"layers: got a pool of {cache.pages.num_free} free pages; expected {cache.pages_for(length)}, for "
            f"{length} tokens of text; raise num_pages or pass a shorter text"
        )


def _acceptance_rates(
    model: Any, ids: Sequence[int], aux_hidden_states: dict[str, Tensor], fed: Tensor, dist: Tensor
) -> list[float]:
    """Acceptance rates of the head's first token with these layers, by place."""
    model.aux_hidden_states = tuple(f"entering:{index}" for index in ids)
    features = model.features(aux_hidden_states)
    shape = chain_layout((0,), (len(fed) - 1,), fed.device)
    _reserve_pages(model.cache, len(fed))
    try:
        logits = model.logits(model.extend(shape.rows, fed[1:], features[:-1], shape.offsets)).float()
    finally:
        model.cache.release([0])
    known = dist if model.token_ids is None else dist[:, model.token_ids]
    return torch.minimum(known, logits.softmax(-1)[:, : known.shape[1]]).sum(-1).tolist()
