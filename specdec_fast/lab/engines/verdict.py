"""Tests what an engine recorded: the joint distribution of three tokens, greedy texts, seeds and batches.

Tests: tests/lab/engines/test_verdict.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from specdec_fast.lab.count_distances import certified_distance, total_variation
from specdec_fast.lab.engines.recording import Answers, Job, Pair
from specdec_fast.lab.engines.settings import Setting
from specdec_fast.lab.rational_oracle import dist_of_logits
from specdec_fast.lab.statistics import chi_square

LEVEL = 1e-5
"""Level of the test: a right engine is called wrong once in 100,000 rows."""
DRAWN_TOKENS = 4
"""Tokens of a drawn text. Three are tested; with the fourth, a step can accept three drafts."""
_SEEDED_TEXTS, _SEEDED_TOKENS = 16, 16

MATCHES, DIFFERS, DID_NOT_RUN = "matches", "differs", "did not run"


@dataclass(frozen=True)
class Row:
    """Findings about one setting of one engine under one sampling.

    Attributes:
        engine: Engine.
        versions: Name -> version of the packages that produced the texts.
        setting: Name of the setting.
        summary: What drafts and verifies.
        own: Whether this project verifies the drafts.
        sampling: temperature, top_k, top_p.
        draws: Number of drawn texts.
        distance: Total variation between the counts of the first three tokens and their exact distribution.
        limit: 99.9% quantile of that distance for draws from the exact distribution. Counts have some distance always.
        first_at_most: Bound on the true total variation of the first token, with 99.9% confidence.
        p_value: Smallest p-value of chi-square tests of one, two and three tokens, times three (Bonferroni).
        greedy: (equal, all): texts at temperature 0 that equal the target's greedy text.
        seeds: (equal, all): sampled texts that are the same in a second run.
        greedy_batch: (equal, all): greedy texts of a batch that equal the target's; None for single requests.
        sampled_batch: (equal, all): sampled texts that are the same alone and in a batch; None if a batch has one seed.
        verdict: `matches`, `differs` or `did not run`.
        reason: Why it did not run, or which of the parts did not.
        note: What is known about the setting, such as where the engine's developers discuss a deviation.
    """

    engine: str
    versions: dict[str, str]
    setting: str
    summary: str
    own: bool
    sampling: dict[str, float]
    draws: int = 0
    distance: float | None = None
    limit: float | None = None
    first_at_most: float | None = None
    p_value: float | None = None
    greedy: tuple[int, int] | None = None
    seeds: tuple[int, int] | None = None
    greedy_batch: tuple[int, int] | None = None
    sampled_batch: tuple[int, int] | None = None
    verdict: str = DID_NOT_RUN
    reason: str = ""
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields for JSON."""
        return asdict(self)


def jobs_of(
    setting: Setting, pair: Pair, samplings: Sequence[Mapping[str, float]], draws: int, seed: int
) -> dict[str, Job]:
    """Returns the jobs whose answers `rows_of` tests. Greedy texts come first: sampling may change a draft model.

    Args:
        setting: The setting.
        pair: Models and prompts.
        samplings: temperature, top_k and top_p of each row.
        draws: Number of drawn texts under each sampling.
        seed: Seed of the first draw; the others follow.

    Returns:
        Name -> job.
    """
    greedy = {"temperature": 0.0, "top_k": 0, "top_p": 1.0}
    count = len(pair.greedy[0])
    alone = list(range(1, len(pair.prompts) + 1))
    jobs = {"greedy": Job(pair.prompts, alone, greedy, count, False)}
    if setting.batches:
        jobs["batch"] = Job(pair.prompts, alone, greedy, count, True)
    prompts = [pair.prompts[at % len(pair.prompts)] for at in range(_SEEDED_TEXTS)]
    numbers = [1000 + at for at in range(_SEEDED_TEXTS)]
    for at, sampling in enumerate(samplings):
        jobs[f"draws {at}"] = Job(
            [pair.prompt] * draws, range(seed, seed + draws), sampling, DRAWN_TOKENS, setting.seed_per_request
        )
        seeded = Job(prompts, numbers, sampling, _SEEDED_TOKENS, False)
        jobs[f"alone {at}"] = jobs[f"again {at}"] = seeded
        if setting.seed_per_request:
            jobs[f"batch {at}"] = replace(seeded, together=True)
    return jobs


def exact_joint(logits: np.ndarray, sampling: Mapping[str, float]) -> np.ndarray:
    """Computes the distribution of three tokens.

    Args:
        logits: Logits after the prompt, each token and each two tokens, float [1 + V + V * V, V].
        sampling: temperature, top_k, top_p.

    Returns:
        Probabilities of token triples, float64 [V, V, V].
    """
    vocab = logits.shape[1]
    dists = np.stack(
        [dist_of_logits(row, sampling["temperature"], int(sampling["top_k"]), sampling["top_p"]) for row in logits]
    )
    first, second, third = dists[0], dists[1 : 1 + vocab], dists[1 + vocab :].reshape(vocab, vocab, vocab)
    return np.asarray(first[:, None, None] * second[:, :, None] * third)


def distance_limit(joint: np.ndarray, draws: int, trials: int = 2000, seed: int = 0) -> float:
    """Returns the 99.9% quantile of the distance of exact draws, by simulation.

    Args:
        joint: Distribution of the triples, float64 [V, V, V].
        draws: Number of draws.
        trials: Number of simulated experiments.
        seed: Seed of the simulation.
    """
    flat = joint.ravel()
    source = np.random.default_rng(seed)
    found = [total_variation(source.multinomial(draws, flat) / draws, flat) for _ in range(trials)]
    return float(np.quantile(found, 0.999))


def rows_of(
    engine: str, setting: Setting, pair: Pair, samplings: Sequence[Mapping[str, float]], answers: Answers
) -> list[Row]:
    """Tests the answers of an engine.

    Args:
        engine: The engine.
        setting: The setting.
        pair: Models and what they compute.
        samplings: temperature, top_k and top_p of each row.
        answers: Answers to the jobs of `jobs_of`.

    Returns:
        The findings, one row per sampling.
    """
    texts = answers.texts
    shared: dict[str, Any] = {}
    if "greedy" in texts:
        shared["greedy"] = _equal(texts["greedy"], pair.greedy)
    if "batch" in texts:
        shared["greedy_batch"] = _equal(texts["batch"], pair.greedy)
    rows = []
    for at, sampling in enumerate(samplings):
        found = dict(shared)
        if f"draws {at}" in texts:
            found |= _tested(texts[f"draws {at}"], exact_joint(pair.logits, sampling))
        impossible = found.pop("impossible", "")
        if f"again {at}" in texts and f"alone {at}" in texts:
            found["seeds"] = _equal(texts[f"again {at}"], texts[f"alone {at}"])
        if f"batch {at}" in texts and f"alone {at}" in texts:
            found["sampled_batch"] = _equal(texts[f"batch {at}"], texts[f"alone {at}"])
        failed = {job: why for job, why in answers.failures.items() if not job[-1].isdigit() or job.endswith(f" {at}")}
        rows.append(
            Row(
                engine,
                answers.versions,
                setting.name,
                setting.summary,
                setting.own,
                dict(sampling),
                verdict=_verdict(found),
                reason="; ".join(
                    [*([impossible] if impossible else []), *(f"{job}: {why}" for job, why in failed.items())]
                ),
                note=setting.note,
                **found,
            )
        )
    return rows


def _tested(texts: Sequence[Sequence[int]], joint: np.ndarray) -> dict[str, Any]:
    """Tests the first three tokens of texts against their distribution. Impossible texts have a bin of their own."""
    vocab = joint.shape[0]
    possible = [text[:3] for text in texts if len(text) >= 3 and all(0 <= token < vocab for token in text[:3])]
    counts = np.zeros(joint.shape, dtype=np.int64)
    if possible:
        np.add.at(counts, tuple(np.asarray(possible, dtype=np.int64).T), 1)
    lost = len(texts) - len(possible)

    def p_value_of(seen: np.ndarray, exact: np.ndarray) -> float:
        return chi_square(np.append(seen.ravel(), lost), np.append(exact.ravel(), 0.0)).p_value

    # triples alone have little power: an error in the first token is spread over many bins
    parts = [p_value_of(counts.sum(axes), joint.sum(axes)) for axes in ((1, 2), (2,), ())]
    first = np.append(counts.sum((1, 2)), lost)
    found: dict[str, Any] = {
        "draws": len(texts),
        "distance": total_variation(counts / len(texts), joint) + lost / len(texts) / 2,
        "limit": distance_limit(joint, len(texts)),
        "first_at_most": certified_distance(first, np.append(joint.sum((1, 2)), 0.0)),
        "p_value": min(1.0, len(parts) * min(parts)),
    }
    if lost:
        words = f"draws: {lost} of {len(texts)} texts have fewer than three tokens, or tokens outside of the vocabulary"
        found["impossible"] = words
    return found


def _verdict(found: Mapping[str, Any]) -> str:
    """The verdict about the distribution and the greedy texts: what losslessness promises."""
    if "p_value" not in found or "greedy" not in found:
        return DID_NOT_RUN
    equal, total = found["greedy"]
    return MATCHES if found["p_value"] >= LEVEL and equal == total else DIFFERS


def _equal(one: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> tuple[int, int]:
    """The number of equal texts, and of all. A missing text is not equal."""
    return sum(list(a) == list(b) for a, b in zip(one, other)), max(len(one), len(other))
