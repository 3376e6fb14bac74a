"""Exact texts of a target that sees only its newest token, and samples of verified chains completed by it."""

from __future__ import annotations

from collections import Counter
from itertools import product

import numpy as np
import torch
from torch import Tensor

from oracles.chi_square import p_value
from oracles.distributions import dist

VOCAB, DEPTH, ROOT = 5, 2, 0
SETTINGS: dict[str, dict[str, float]] = {
    "plain": {},
    "top-k": {"temperature": 0.7, "top_k": 3},
    "top-p": {"temperature": 1.3, "top_p": 0.8},
    "min-p": {"temperature": 0.9, "min_p": 0.2},
}


def table(seed: int) -> Tensor:
    """Logits after each token, float32 [V, V]."""
    return torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed)) * 1.5


def probs(logits: Tensor, settings: dict[str, float]) -> np.ndarray:
    """Probabilities after each token, float64 [V, V]."""
    own = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | settings
    rows = logits.double().numpy()
    return np.stack([dist(row, own["temperature"], int(own["top_k"]), own["top_p"], own["min_p"]) for row in rows])


def text_dist(after: np.ndarray, length: int = DEPTH + 1) -> dict[tuple[int, ...], float]:
    """Probability of every text of `length` tokens behind the root."""
    found = {}
    for text in product(range(VOCAB), repeat=length):
        chance = 1.0
        for before, token in zip((ROOT, *text), text):
            chance *= float(after[before, token])
        found[text] = chance
    return found


def sampled_chains(after: np.ndarray, rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draft chains sampled from a table, int64 [rows, DEPTH], and what they were sampled from, [rows, DEPTH, V]."""
    source, q = torch.Generator().manual_seed(seed), torch.from_numpy(after).float()
    tokens = torch.full((rows, DEPTH + 1), ROOT)
    for at in range(DEPTH):
        tokens[:, at + 1] = torch.multinomial(q[tokens[:, at]], 1, generator=source)[:, 0]
    return tokens[:, 1:], q[tokens[:, :-1]]


def logits_of(target: Tensor, drafted: Tensor) -> Tensor:
    """The target's logits after the root and after each draft token, [rows, K + 1, V]."""
    return target[torch.cat([torch.full((drafted.shape[0], 1), ROOT), drafted.long()], 1)]


def text_p_value(out: Tensor, after: np.ndarray) -> float:
    """Tests the joint distribution of the emitted texts. Shorter ones are completed from the exact distribution.

    Args:
        out: Emitted tokens, [rows, length], padded with -1.
        after: Probabilities after each token, float64 [V, V].
    """
    source, p = torch.Generator().manual_seed(12345), torch.from_numpy(after)
    whole = out.long().clone()
    for at in range(whole.shape[1]):
        missing = whole[:, at] < 0
        before = whole[missing, at - 1]
        if len(before):
            whole[missing, at] = torch.multinomial(p[before], 1, generator=source)[:, 0]
    counts = Counter(map(tuple, whole.tolist()))
    return p_value(counts, text_dist(after, whole.shape[1]))
