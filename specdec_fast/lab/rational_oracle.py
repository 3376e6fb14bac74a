"""Independent answers in rational arithmetic, written from the definitions: distributions of texts, acceptance, bounds.

Shares nothing with the rules and operators under test but the numbers that go in. Tests:
tests/lab/test_rational_oracle.py.
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
    """Small integer weights, zeros among them, normalised."""
    while True:
        weights = [max(source.randrange(-2, 7), 0) for _ in range(vocab)]
        if sum(weights):
            return [Fraction(weight, sum(weights)) for weight in weights]


class RationalModel:
    """A distribution per text, a function of its length and last token: zeros, point masses and ties with `like` all
    occur.

    vocab: size; seed: which model; like: a model with whose distributions one in five of ours agrees (p = q: nothing
    may be refused); memory: how many last tokens matter (0 and `timeless`: the same distribution everywhere).
    """

    def __init__(
        self, vocab: int, seed: int, like: RationalModel | None = None, *, memory: int = 1, timeless: bool = False
    ) -> None:
        self.vocab, self.seed, self.like, self.memory, self.timeless = vocab, seed, like, memory, timeless
        self._known: dict[object, list[Fraction]] = {}

    def key(self, text: Text) -> object:
        """Texts of equal key have the same distribution, and so have their continuations."""
        return (0 if self.timeless else len(text), text[-self.memory :] if self.memory else ())

    def after(self, text: Text) -> list[Fraction]:
        key = self.key(text)
        if key not in self._known:
            source = random.Random(f"{self.seed}-{key}")
            same = self.like is not None and source.random() < 0.2
            self._known[key] = self.like.after(text) if same and self.like else rational_dist(source, self.vocab)
        return self._known[key]


def target_dist(after: After, length: int) -> dict[Text, Fraction]:
    """The joint distribution of the first `length` tokens of plain decoding; texts of probability 0 are left out."""
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
    """All chains of `depth` tokens drawn one after the other from q after `context`."""
    return target_dist(lambda text: q_after((*context, *text)), depth)


def chain_ratios(p_after: After, q_after: After, context: Text, drafted: Text) -> list[Fraction]:
    """p / q of every token of a drafted chain."""
    prefixes = [(*context, *drafted[:at]) for at in range(len(drafted))]
    return [p_after(before)[token] / q_after(before)[token] for before, token in zip(prefixes, drafted, strict=True)]


def rejection_accepted(p_after: After, q_after: After, context: Text, depth: int) -> Fraction:
    """Expected accepted tokens of the rejection rule: sum over i of E[prod_{j<=i} min(1, p/q)] (Leviathan et al.
    2023).
    """
    total = Fraction(0)
    for drafted, chance in drafted_chains(q_after, context, depth).items():
        alive = Fraction(1)
        for ratio in chain_ratios(p_after, q_after, context, drafted):
            alive *= min(Fraction(1), ratio)
            total += chance * alive
    return total


def block_accepted(p_after: After, q_after: After, context: Text, depth: int) -> Fraction:
    """Expected accepted tokens of block verification: sum over i of E[w_i], w_i = min(1, w_{i-1} p/q) (Sun et al.)."""
    total = Fraction(0)
    for drafted, chance in drafted_chains(q_after, context, depth).items():
        weight = Fraction(1)
        for ratio in chain_ratios(p_after, q_after, context, drafted):
            weight = min(Fraction(1), weight * ratio)
            total += chance * weight
    return total


def coupled_accepted(p_after: After, q_after: After, context: Text, depth: int) -> Fraction:
    """Expected accepted tokens of replay on a chain coupled by its noise: both choose x with chance
    1 / sum_y max(p_y / p_x, q_y / q_x) (Daliri, Musco, Suresh 2024), independently at every position.
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
    """(1 - alpha^(depth+1)) / (1 - alpha): expected tokens per step if every test passes with chance alpha."""
    return depth + 1 if alpha == 1 else (1 - alpha ** (depth + 1)) / (1 - alpha)


def overlap(p: Distribution, q: Distribution) -> Fraction:
    """sum min(p, q) = 1 - TV: the acceptance rate of one drawn token."""
    return sum((min(a, b) for a, b in zip(p, q, strict=True)), Fraction(0))


def coupled_choice(p: Distribution, q: Distribution, drafted: int) -> list[Fraction]:
    """The distribution of the target's choice, given that the draft chose `drafted` by the same Gumbel noise.

    With E_i = exp(-noise_i), independent exponential times, the draft takes the least E_i / q_i and the target the
    least E_i / p_i. For the choice c and r = E_drafted / E_c, the others have to be later than E_c times the larger of
    r q_i / q_drafted and p_i / p_c: linear in r between the places where these are equal, so every piece has a rational
    integral.
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
        last = 1 / by_draft[c] if by_draft[c] else None  # None: no end
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
    """alpha*: the most any lossless rule can accept at one node (Hu et al. 2025), min over H of p(H) + 1 - P(all in H).

    sets: chance of each set of proposed tokens. Tries all subsets H of the vocabulary: small ones only.
    """
    tokens = [token for token, weight in enumerate(p) if weight]
    best = Fraction(1)
    for inside in chain.from_iterable(combinations(tokens, size) for size in range(len(tokens) + 1)):
        # tokens that p forbids cost nothing, so H holds all of them
        wide = frozenset(inside) | frozenset(token for token, weight in enumerate(p) if not weight)
        missing = 1 - sum((chance for drafted, chance in sets.items() if drafted <= wide), Fraction(0))
        best = min(best, sum((p[token] for token in inside), Fraction(0)) + missing)
    return best


def text_dist(step: Callable[[Text], Iterable[tuple[float, Text]]], length: int) -> dict[Text, float]:
    """The joint distribution of the first `length` tokens when steps are repeated until there are enough."""
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
    """Probabilities float64 [V] of one row of logits [V]: temperature, top-k, top-p, min-p; ties to the lower id.

    top_p and min_p are taken in float32, as batches of requests keep them: 0.1 of ten equal tokens are two.

    Raises ValueError for NaN, +inf, or a row without a finite logit.
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
