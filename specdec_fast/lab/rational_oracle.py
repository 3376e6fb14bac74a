"""Reference results in rational arithmetic, from the definitions: text distributions, acceptance and bounds.

Shares no code with the rules and operators under test. Tests: tests/lab/test_rational_oracle.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from itertools import chain, combinations, pairwise

import numpy as np

Text = tuple[int, ...]
Distribution = Sequence[Fraction]
After = Callable[[Text], Distribution]


def rational_dist(source: random.Random, vocab: int) -> list[Fraction]:
    """Returns a random distribution from small integer weights, some of them zero."""
    while True:
        weights = [max(source.randrange(-2, 7), 0) for _ in range(vocab)]
        if sum(weights):
            return [Fraction(weight, sum(weights)) for weight in weights]


class RationalModel:
    """A random language model. Its distribution depends on the length and the last tokens of a text.

    Zeros and point masses occur.

    Args:
        vocab: Number of tokens.
        seed: Seed of the model.
        like: Another model. One in five distributions is equal to its distribution, so that p = q occurs.
        memory: Number of last tokens that matter.
        timeless: Ignore the length. With memory 0, the distribution is the same after every text.
    """

    def __init__(
        self, vocab: int, seed: int, like: RationalModel | None = None, *, memory: int = 1, timeless: bool = False
    ) -> None:
        self.vocab, self.seed, self.like, self.memory, self.timeless = vocab, seed, like, memory, timeless
        self._known: dict[object, list[Fraction]] = {}

    def key(self, text: Text) -> object:
        """Returns a key. Texts with equal keys have the same distribution, and so do their continuations."""
        return (0 if self.timeless else len(text), text[-self.memory :] if self.memory else ())

    def after(self, text: Text) -> list[Fraction]:
        """Returns the distribution of the next token."""
        key = self.key(text)
        if key not in self._known:
            source = random.Random(f"{self.seed}-{key}")
            same = self.like is not None and source.random() < 0.2
            self._known[key] = self.like.after(text) if same and self.like else rational_dist(source, self.vocab)
        return self._known[key]


def target_dist(after: After, length: int) -> dict[Text, Fraction]:
    """Returns the joint distribution of the first `length` tokens of plain decoding, without impossible texts."""
    found: dict[Text, Fraction] = {(): Fraction(1)}
    for _ in range(length):
        found = {
            (*text, token): chance * weight
            for text, chance in found.items()
            for token, weight in enumerate(after(text))
            if weight
        }
    return found


def drafted_chains(q_after: After, context: Text, depth: int) -> dict[Text, Fraction]:
    """Returns all chains of `depth` tokens sampled from q after `context`, with their probabilities."""
    return target_dist(lambda text: q_after((*context, *text)), depth)


def chain_ratios(p_after: After, q_after: After, context: Text, drafted: Text) -> list[Fraction]:
    """Returns p / q of every token of a drafted chain."""
    prefixes = [(*context, *drafted[:at]) for at in range(len(drafted))]
    return [p_after(before)[token] / q_after(before)[token] for before, token in zip(prefixes, drafted, strict=True)]


def rejection_accepted(p_after: After, q_after: After, context: Text, depth: int) -> Fraction:
    """Returns the expected accepted tokens of rule `rejection`: sum over i of E[prod_{j<=i} min(1, p/q)]."""
    total = Fraction(0)
    for drafted, chance in drafted_chains(q_after, context, depth).items():
        alive = Fraction(1)
        for ratio in chain_ratios(p_after, q_after, context, drafted):
            alive *= min(Fraction(1), ratio)
            total += chance * alive
    return total


def block_accepted(p_after: After, q_after: After, context: Text, depth: int) -> Fraction:
    """Returns the expected accepted tokens of rule `block`: sum over i of E[w_i], w_i = min(1, w_{i-1} p/q)."""
    total = Fraction(0)
    for drafted, chance in drafted_chains(q_after, context, depth).items():
        weight = Fraction(1)
        for ratio in chain_ratios(p_after, q_after, context, drafted):
            weight = min(Fraction(1), weight * ratio)
            total += chance * weight
    return total


def coupled_accepted(p_after: After, q_after: After, context: Text, depth: int) -> Fraction:
    """Computes the expected accepted tokens of rule `replay` on a chain that is coupled by its noise.

    Target and draft both sample x with probability 1 / sum_y max(p_y / p_x, q_y / q_x), independently at every
    position.

    Args:
        p_after: The target's distribution after a text.
        q_after: The draft's distribution after a text.
        context: The text before the draft.
        depth: Length of the chain.

    Returns:
        Expected accepted tokens.

    Source:
        Daliri, Musco, Suresh 2024.
    """
    if not depth:
        return Fraction(0)
    total, p, q = Fraction(0), p_after(context), q_after(context)
    for token, (own, drafted) in enumerate(zip(p, q, strict=True)):
        if own and drafted:
            both = 1 / sum((max(a / own, b / drafted) for a, b in zip(p, q, strict=True)), Fraction(0))
            total += both * (1 + coupled_accepted(p_after, q_after, (*context, token), depth - 1))
    return total


def geometric_tokens(alpha: float | Fraction, depth: int) -> float | Fraction:
    """Returns (1 - alpha^(depth+1)) / (1 - alpha): expected tokens per step at acceptance rate alpha."""
    return depth + 1 if alpha == 1 else (1 - alpha ** (depth + 1)) / (1 - alpha)


def overlap(p: Distribution, q: Distribution) -> Fraction:
    """Returns sum min(p, q) = 1 - TV, the acceptance rate of one sampled token."""
    return sum((min(a, b) for a, b in zip(p, q, strict=True)), Fraction(0))


def coupled_choice(p: Distribution, q: Distribution, drafted: int) -> list[Fraction]:
    """Computes the distribution of the target's choice, given that the draft sampled `drafted` with the same noise.

    E_i = exp(-noise_i) are independent exponential variables. The draft samples the least E_i / q_i, and the target
    the least E_i / p_i. Let c be the target's choice and r = E_drafted / E_c. Every other E_i must exceed E_c times the
    larger of r q_i / q_drafted and p_i / p_c. This bound is piecewise linear in r, so every piece has a rational
    integral.

    Args:
        p: The target's distribution.
        q: The draft's distribution.
        drafted: The draft token.

    Returns:
        Probability of every token as the target's choice.
    """
    found = [Fraction(0)] * len(p)
    by_draft = [weight / q[drafted] for weight in q]
    for c, own in enumerate(p):
        if not own:
            continue
        by_target = [weight / own for weight in p]
        if c == drafted:
            found[c] = 1 / sum(map(max, by_draft, by_target), Fraction(0)) / q[drafted]
            continue
        others = [i for i in range(len(p)) if i not in (c, drafted)]
        equal = {i: by_target[i] / by_draft[i] for i in others if by_draft[i]}
        last = 1 / by_draft[c] if by_draft[c] else None  # None: unbounded
        inside = sorted(r for r in equal.values() if r > by_target[drafted] and (last is None or r < last))
        ends: list[Fraction | None] = [by_target[drafted], *inside, last]
        for low, high in pairwise(ends):
            if low is None or (high is not None and high <= low):
                continue
            slope = 1 + sum((by_draft[i] for i in others if i in equal and equal[i] <= low), Fraction(0))
            level = 1 + sum((by_target[i] for i in others if i not in equal or equal[i] > low), Fraction(0))
            beyond = Fraction(0) if high is None else 1 / (slope * high + level)
            found[c] += (1 / (slope * low + level) - beyond) / slope / q[drafted]
    return found


def transport_bound(p: Distribution, sets: Mapping[frozenset[int], Fraction]) -> Fraction:
    """Computes alpha*, the largest acceptance rate of any lossless rule at one node.

    It is the minimum over token sets H of p(H) + 1 - P(all proposals in H). All subsets are enumerated, so the
    vocabulary must be small.

    Args:
        p: The target's distribution.
        sets: Probability of each set of proposed tokens.

    Returns:
        The bound.

    Source:
        Hu et al. 2025.
    """
    tokens = [token for token, weight in enumerate(p) if weight]
    best = Fraction(1)
    for inside in chain.from_iterable(combinations(tokens, size) for size in range(len(tokens) + 1)):
        # tokens with p = 0 do not increase p(H), so H contains all of them
        wide = frozenset(inside) | frozenset(token for token, weight in enumerate(p) if not weight)
        missing = 1 - sum((chance for drafted, chance in sets.items() if drafted <= wide), Fraction(0))
        best = min(best, sum((p[token] for token in inside), Fraction(0)) + missing)
    return best


def text_dist(step: Callable[[Text], Iterable[tuple[float, Text]]], length: int) -> dict[Text, float]:
    """Computes the joint distribution of the first `length` tokens of repeated steps.

    Args:
        step: Returns (probability, emitted tokens) of every outcome after a context.
        length: Number of tokens.

    Returns:
        Probability of every text.
    """
    found: dict[Text, float] = {}
    pending: dict[Text, float] = {(): 1.0}
    while pending:
        context = min(pending, key=len)
        chance = pending.pop(context)
        for share, emitted in step(context):
            text = (*context, *emitted)
            place = found if len(text) >= length else pending
            text = text[:length]
            place[text] = place.get(text, 0.0) + chance * share
    return found


def dist_of_logits(
    logits: np.ndarray, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """Computes the processed distribution of one row of logits. Ties go to the lower id.

    `top_p` and `min_p` are rounded to float32, because batches of requests store them in float32. The rounded 0.1 is
    larger than 0.1, so top-p 0.1 keeps two of ten equal tokens.

    Args:
        logits: Logits, float [V].
        temperature: Temperature; 0 is greedy.
        top_k: Number of kept tokens; 0 keeps all.
        top_p: Kept probability.
        min_p: Least probability, relative to the largest.

    Returns:
        Probabilities, float64 [V].

    Raises:
        ValueError: If a logit is NaN or +inf, or none is finite.
    """
    level = np.asarray(logits, dtype=np.float64)
    if np.isnan(level).any() or (level == np.inf).any() or not np.isfinite(level).any():
        raise ValueError("logits: got NaN, +inf or no finite number; expected finite logits (-inf where masked)")
    top_p, min_p = float(np.float32(top_p)), float(np.float32(min_p))
    order = np.lexsort((np.arange(len(level)), -level))
    result = np.zeros(len(level))
    if temperature == 0:
        result[order[0]] = 1.0
        return result
    weight = np.exp((level - level[order[0]]) / temperature)
    kept = order[: top_k or len(level)]
    if top_p < 1:
        before = np.concatenate([[0.0], np.cumsum(weight[kept])[:-1]])
        kept = kept[before < top_p * weight[kept].sum()]
    kept = kept[weight[kept] >= min_p]
    result[kept] = weight[kept]
    return np.asarray(result / result.sum())
