"""Small target and draft models with rational distributions, with zeros, equal rows and point masses among them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from fractions import Fraction

import torch

from oracles.exact import Text
from specdec_fast.core.distributions import TokenDistributions
from specdec_kernels import distribution_stats


def rational_dist(source: random.Random, vocab: int) -> list[Fraction]:
    """Returns a random distribution from weights 0..6, at least one of them positive."""
    while True:
        weights = [max(source.randrange(-2, 7), 0) for _ in range(vocab)]
        if sum(weights):
            return [Fraction(weight, sum(weights)) for weight in weights]


class RationalModel:
    """A random model whose distribution depends on the length and the last two tokens of a text."""

    def __init__(self, vocab: int, seed: int, like: RationalModel | None = None) -> None:
        self.vocab, self.seed, self.like = vocab, seed, like
        self.known: dict[object, list[Fraction]] = {}

    def after(self, text: Text) -> list[Fraction]:
        key = (len(text), text[-2:])
        if key not in self.known:
            source = random.Random(f"{self.seed}-{key}")
            if self.like is not None and source.random() < 0.2:
                self.known[key] = self.like.after(text)  # p = q: nothing may be rejected
            else:
                self.known[key] = rational_dist(source, self.vocab)
        return self.known[key]


def dists_of(rows: Sequence[Sequence[Fraction]], dtype: torch.dtype = torch.float64) -> TokenDistributions:
    """Converts rational distributions to logits with statistics at temperature 1."""
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
