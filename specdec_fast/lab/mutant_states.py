"""Further steps of the mutants: wrong state after a step, another request's data, and noise that is used twice.

Like those of `mutant_steps`, they yield every outcome with its probability. The small models have no recurrent layers.
A state that holds other tokens than the text is a context that differs from the text.
Tests: tests/lab/test_kill_matrix.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from specdec_fast.lab.mutant_steps import (
    Distribution,
    ModelPair,
    Outcomes,
    accept_probability,
    normalised,
    point_mass,
    positive_part,
)
from specdec_fast.lab.rational_oracle import Text

LAST_UNIFORMS = 129 / 2**32
"""Chance of a uniform of exactly 1, if 32 random bits are divided by 2**32 - 1 and rounded to float32."""


def read_first_column_after_no_drafts(models: ModelPair, context: Text) -> Outcomes:
    """Every second step drafts nothing, and the step after it reads the state before that step's token."""
    p = models.p(context)
    if len(context) % 2 == 0:
        yield from ((weight, (token,)) for token, weight in enumerate(p) if weight)
        return
    for token, weight in enumerate(p):
        yield from ((weight * w, (token, after)) for after, w in enumerate(p) if weight * w)


def verify_with_another_slot(models: ModelPair, context: Text) -> Outcomes:
    """The test divides by the draft distribution of another request, whose text is one token longer."""
    p, q, other = models.p(context), models.q(context), models.q((*context, 0))
    for token, chance in enumerate(q):
        if not chance:
            continue
        accepted = accept_probability(p, other, token)
        if accepted:
            yield chance * accepted, (token,)
        rest = positive_part(p, other)
        recovered = normalised(rest) if sum(rest) else p
        if accepted < 1:
            yield from ((chance * (1 - accepted) * w, (y,)) for y, w in enumerate(recovered) if w)


def redraw_with_draft_noise(p: Sequence[float], q: Sequence[float], token: int) -> Distribution:
    """Distribution of the recovered token if the Gumbel noise that drew the draft token also draws from the residual.

    A Gumbel-max is the first of exponential clocks with the weights as rates. Given that `token` came first at time t,
    the clocks of the other tokens are shifted by q t, and t is exponential with rate 1.

    Args:
        p: The target's distribution.
        q: The draft's distribution.
        token: The draft token, which was rejected.

    Returns:
        The distribution, for residuals of at most two tokens.
    """
    rest = normalised(positive_part(p, q))
    left = [v for v, weight in enumerate(rest) if weight and v != token]
    assert len(left) <= 2, "the closed form covers small vocabularies"
    if len(left) < 2:
        return rest
    a, b = left
    ahead = q[b] / rest[b] - q[a] / rest[a]  # how much later the clock of b starts than that of a, per unit of t
    if ahead >= 0:
        first = 1 - rest[b] / (rest[a] + rest[b]) / (1 + rest[a] * ahead)
    else:
        first = rest[a] / (rest[a] + rest[b]) / (1 - rest[b] * ahead)
    return [first * float(v == a) + (1 - first) * float(v == b) for v in range(len(p))]


def last_token_at_the_edge(dist: Distribution) -> Distribution:
    """Returns a distribution sampled by its cumulative sum with uniforms that may be 1: the last token then wins."""
    edge = point_mass(len(dist) - 1, len(dist))
    total = sum(dist) or 1.0
    return [(1 - LAST_UNIFORMS) * weight / total + LAST_UNIFORMS * w for weight, w in zip(dist, edge)]


def ranks_draw_their_own_seeds(models: ModelPair, context: Text) -> Outcomes:
    """Two tensor-parallel ranks draw different tokens: the first is emitted, and each feeds its own to its half."""
    p = models.p(context)
    for token, weight in enumerate(p):
        for other, chance in enumerate(p):
            if not weight * chance:
                continue
            mixed = zip(models.p((*context, token)), models.p((*context, other)))
            yield from ((weight * chance * (a + b) / 2, (token, y)) for y, (a, b) in enumerate(mixed) if a + b)
