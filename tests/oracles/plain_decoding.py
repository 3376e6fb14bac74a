"""Decoding without cache, speculation and our model code: a full forward pass per token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from oracles.distributions import dist
from specdec_fast.sampling.params import SamplingParams
from specdec_kernels.random import replay_noise

LogitsAfter = Callable[[Sequence[int]], np.ndarray]


def recompute(model: Any) -> LogitsAfter:
    """Returns logits [V] after a text, by an untouched transformers model without a cache."""

    def logits_after(tokens: Sequence[int]) -> np.ndarray:
        with torch.no_grad():
            logits: torch.Tensor = model(torch.tensor([list(tokens)]), use_cache=False).logits
        return logits[0, -1].double().numpy()

    return logits_after


def replay_choice(logits: np.ndarray, params: SamplingParams, position: int) -> int:
    """Returns the token at an absolute position: arg-max of the log float64 distribution plus the keyed noise."""
    weights = dist(logits, params.temperature, params.top_k, params.top_p, params.min_p)
    if params.temperature == 0:
        return int(weights.argmax())
    assert params.seed is not None
    noise = replay_noise(torch.tensor([params.seed]), torch.tensor([position], dtype=torch.int32), len(weights))
    with np.errstate(divide="ignore"):
        return int((np.log(weights) + noise[0].double().numpy()).argmax())


def plain_decode(
    logits_after: LogitsAfter, prompt: Sequence[int], params: SamplingParams, eos: Sequence[int] = ()
) -> list[int]:
    """Returns the tokens of a request with these parameters under replay."""
    tokens = list(prompt)
    for count in range(params.max_new_tokens):
        logits = logits_after(tokens)
        ends = [*(() if params.ignore_eos else eos), *params.stop_token_ids]
        if count < params.min_new_tokens:
            logits[ends] = -np.inf
        tokens.append(replay_choice(logits, params, len(tokens)))
        if tokens[-1] in ends:
            break
    return tokens[len(prompt) :]
