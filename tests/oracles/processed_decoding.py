"""Plain decoding with all sampling parameters, written from the definitions: dense, slow, one token at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from oracles.distributions import dist
from oracles.plain_decoding import LogitsAfter, replay_choice
from specdec_fast.sampling.params import SamplingParams


def processed(
    logits: np.ndarray, params: SamplingParams, prompt: Sequence[int], new: Sequence[int], ends: Sequence[int]
) -> np.ndarray:
    """Returns logits float64 [V] after prompt and new tokens, with all processors."""
    text = [*prompt, *new]
    given = torch.from_numpy(np.array(logits, dtype=np.float64))
    for custom in params.logits_processors:
        given = custom(list(text), given)
    result = given.numpy()
    for token in {*prompt, *new}:
        factor = params.repetition_penalty
        result[token] = result[token] * factor if result[token] < 0 else result[token] / factor
    for token in range(len(result)):
        count = list(new).count(token)
        result[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
        result[token] += params.logit_bias.get(token, 0.0)
    forbidden = set(params.banned_token_ids)
    size = params.no_repeat_ngram_size
    if size:
        grams = {tuple(text[at : at + size]) for at in range(len(text) - size + 1)}
        start = [*text[len(text) - size + 1 :]] if size > 1 else []
        forbidden |= {token for token in range(len(result)) if (*start, token) in grams}
    for *before, last in params.bad_word_ids:
        if text[len(text) - len(before) :] == before:
            forbidden.add(last)
    if len(new) < params.min_new_tokens:
        forbidden |= set(ends)
    everything = set(range(len(result)))
    if len(new) in params.forced:
        forbidden |= everything - {params.forced[len(new)]}
    if params.allowed_token_ids is not None:
        forbidden |= everything - set(params.allowed_token_ids)
    grammar: Any = params.grammar
    if grammar is not None:
        follows, complete = grammar.follows(new)
        forbidden |= everything - (follows - set(ends)) - (set(ends) if complete else set())
    result[sorted(forbidden)] = -np.inf
    return result


def processed_dist(
    logits: np.ndarray, params: SamplingParams, prompt: Sequence[int], new: Sequence[int], ends: Sequence[int] = ()
) -> np.ndarray:
    """Returns probabilities float64 [V] of the next token."""
    row = processed(logits, params, prompt, new, ends)
    return dist(row, params.temperature, params.top_k, params.top_p, params.min_p)


def processed_decode(
    logits_after: LogitsAfter, prompt: Sequence[int], params: SamplingParams, eos: Sequence[int] = ()
) -> list[int]:
    """Returns the tokens of a request with these parameters under replay."""
    ends = [*(() if params.ignore_eos else eos), *params.stop_token_ids]
    new: list[int] = []
    while len(new) < params.max_new_tokens:
        row = processed(logits_after([*prompt, *new]), params, prompt, new, ends)
        new.append(replay_choice(row, params, len(prompt) + len(new)))
        if new[-1] in ends:
            break
    return new
