"""Next-token distributions in float64, from the definition: temperature, top-k, top-p, min-p; ties to the lower id."""

from __future__ import annotations

import numpy as np


def dist(logits: np.ndarray, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> np.ndarray:
    """Returns probabilities float64 [V] of one row of logits [V]."""
    level = np.asarray(logits, dtype=np.float64)
    vocab = level.shape[0]
    order = sorted(range(vocab), key=lambda token: (-level[token], token))
    result = np.zeros(vocab)
    if temperature == 0:
        result[order[0]] = 1.0
        return result
    weight = np.exp((level - level[order[0]]) / temperature)
    kept = order[: top_k or vocab]
    if top_p < 1:
        total, before, nucleus = sum(weight[token] for token in kept), 0.0, []
        for token in kept:
            if before >= top_p * total:
                break
            nucleus.append(token)
            before += weight[token]
        kept = nucleus
    kept = [token for token in kept if weight[token] >= min_p]
    result[kept] = weight[kept]
    return result / result.sum()


def joint(dist_after, length: int, vocab: int) -> dict[tuple[int, ...], float]:
    """Returns the probabilities of all texts of `length` tokens; dist_after(text) is the next token's distribution."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        longer = {}
        for text, probability in found.items():
            following = dist_after(text)
            for token in range(vocab):
                longer[(*text, token)] = probability * float(following[token])
        found = longer
    return found
