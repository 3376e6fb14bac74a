"""Small target and draft models with rational distributions: zeros, equal rows, point masses and ordinary rows all
occur.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from fractions import Fraction

import torch

from oracles.exact import Text
from specdec_fast.core.distributions import TokenDistributions
from specdec_kernels import distribution_stats


def rational_dist(source: random.Random, vocab: int) -> list[Fraction]:
    """Weights 0..6, at least one of them positive, normalised."""
    while True:
        weights = [max(source.randrange(-2, 7), 0) for _ in range(vocab)]
        if sum(weights):
            return [Fraction(weight, sum(weights)) for weight in weights]


class RationalModel:
    """A distribution per text, looked up by the length and the last two tokens of the text. Texts begin empty."""

    def __init__(self, vocab: int, seed: int, like: RationalModel | None = None) -> None:
        self.vocab, self.seed, self.like = vocab, seed, like
        self.known: dict[object, list[Fraction]] = {}

    def after(self, text: Text) -> list[Fraction]:
        key = (len(text), text[-2:])
        if key not in self.known:
            source = random.Random(f"{self.seed}-{key}")
            if self.like is not None and source.random() < 0.2:
                self.known[key] = self.like.after(text)  # p = q: nothing may be refused
            else:
                self.known[key] = rational_dist(source, self.vocab)
        return self.known[key]


def dists_of(rows: Sequence[Sequence[Fraction]], dtype: torch.dtype = torch.float64) -> TokenDistributions:
    """The same distributions as the engine carries them: logits and their statistics at temperature 1."""
    logits = torch.tensor([[float(weight) for weight in row] for row in rows], dtype=torch.float64).log().to(dtype)
    count = len(rows)
    return TokenDistributions(
        logits,
        *distribution_stats(
            logits,
            torch.ones(count),
            torch.zeros(count, dtype=torch.int32),
            torch.ones(count),
            torch.zeros(count),
        ),
    )


After = Callable[[Text], Sequence[Fraction]]
