"""What is concluded from recorded texts: of a right sampler, of wrong ones, and of jobs that failed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from specdec_fast.lab.engines.recording import Answers, Pair
from specdec_fast.lab.engines.settings import Setting, settings_of
from specdec_fast.lab.engines.verdict import LEVEL, Row, distance_limit, exact_joint, jobs_of, rows_of

SAMPLING = {"temperature": 0.9, "top_k": 8, "top_p": 0.9}
BATCHED = Setting("x", "a setting", batches=True, seed_per_request=True)


def drawn(joint: np.ndarray, count: int, seed: int = 0) -> list[list[int]]:
    source = np.random.default_rng(seed)
    cells = source.choice(joint.size, count, p=joint.ravel())
    return [[*(int(each) for each in np.unravel_index(cell, joint.shape)), 0] for cell in cells]


def answers(pair: Pair, **more: Any) -> Answers:
    texts = {
        "greedy": pair.greedy,
        "batch": pair.greedy,
        "alone 0": [[at] for at in range(16)],
        "again 0": [[at] for at in range(16)],
        "batch 0": [[at] for at in range(16)],
        "draws 0": drawn(exact_joint(pair.logits, SAMPLING), 2000),
    }
    return Answers({"engine": "1"}, texts | more, {})


def row(pair: Pair, found: Answers, setting: Setting = BATCHED) -> Row:
    return rows_of("engine", setting, pair, [SAMPLING], found)[0]


def test_the_joint_distribution_is_a_product_of_processed_distributions(pair: Pair) -> None:
    joint = exact_joint(pair.logits, {"temperature": 0.5, "top_k": 3, "top_p": 1.0})
    assert joint.sum() == pytest.approx(1) and np.count_nonzero(joint) == 27
    logits = pair.logits[0].astype(np.float64) / 0.5
    kept = np.sort(logits)[-3:]
    weights = np.where(logits >= kept[0], np.exp(logits), 0)
    assert np.allclose(joint.sum((1, 2)), weights / weights.sum())
    after = pair.logits[1 + 4]  # after token 4
    second = joint[4].sum(1) / joint[4].sum() if joint[4].sum() else None
    if second is not None:
        assert second.argmax() == after.argmax()


def test_a_right_sampler_matches(pair: Pair) -> None:
    found = row(pair, answers(pair))
    assert found.verdict == "matches" and found.p_value is not None and found.p_value > LEVEL
    assert found.distance is not None and found.limit is not None and found.distance < found.limit
    assert found.first_at_most is not None and found.first_at_most < 0.15
    assert (found.greedy, found.seeds, found.greedy_batch, found.sampled_batch) == ((8, 8), (16, 16), (8, 8), (16, 16))


def test_a_sampler_that_ignores_top_p_differs(pair: Pair) -> None:
    wrong = drawn(exact_joint(pair.logits, SAMPLING | {"top_p": 1.0}), 2000)
    found = row(pair, answers(pair, **{"draws 0": wrong}))
    assert found.verdict == "differs" and found.p_value is not None and found.p_value < LEVEL
    assert found.distance is not None and found.limit is not None and found.distance > found.limit
    exact, true = (exact_joint(pair.logits, SAMPLING | more).sum((1, 2)) for more in ({}, {"top_p": 1.0}))
    assert found.first_at_most is not None and found.first_at_most > np.abs(exact - true).sum() / 2, "the bound holds"


def test_right_marginals_with_a_wrong_joint_distribution_differ(pair: Pair) -> None:
    """Every position has its right distribution, but the tokens of a text do not belong together."""
    texts = np.asarray(drawn(exact_joint(pair.logits, SAMPLING), 2000))
    source = np.random.default_rng(3)
    mixed = np.stack([source.permutation(texts[:, at]) for at in range(4)], 1)
    assert row(pair, answers(pair, **{"draws 0": mixed.tolist()})).verdict == "differs"


def test_one_wrong_greedy_text_differs(pair: Pair) -> None:
    texts = [list(text) for text in pair.greedy]
    texts[3][-1] = (texts[3][-1] + 1) % 16
    found = row(pair, answers(pair, greedy=texts))
    assert found.verdict == "differs" and found.greedy == (7, 8)


def test_seeds_and_batches_are_counted_and_judge_nothing(pair: Pair) -> None:
    others = [[at + 1] for at in range(16)]
    found = row(pair, answers(pair, **{"again 0": others, "batch 0": others[:0] + [[0]] * 16}))
    assert (found.verdict, found.seeds, found.sampled_batch) == ("matches", (0, 16), (1, 16))


def test_a_failed_job_is_named(pair: Pair) -> None:
    whole = answers(pair)
    texts = {name: each for name, each in whole.texts.items() if name not in ("greedy", "batch")}
    found = row(pair, replace(whole, texts=texts, failures={"greedy": "RuntimeError: no", "draws 1": "other row"}))
    assert found.verdict == "did not run" and found.reason == "greedy: RuntimeError: no"
    assert found.p_value is not None


@pytest.mark.parametrize("text", [[0, 16, 1, 2], [0, -1, 1, 2], [3, 4], []])
def test_impossible_texts_differ_and_are_counted(pair: Pair, text: list[int]) -> None:
    """An engine with a fault may return such texts. The other settings are tested all the same."""
    texts = [text, *answers(pair).texts["draws 0"]]
    found = row(pair, answers(pair, **{"draws 0": texts}))
    assert found.verdict == "differs" and found.reason.startswith("draws: 1 of 2001 texts have fewer than three tokens")


def test_jobs_follow_what_a_setting_can_do(pair: Pair) -> None:
    single = jobs_of(settings_of("transformers", ["assisted"])[0], pair, [SAMPLING], 10, seed=5)
    assert list(single) == ["greedy", "draws 0", "alone 0", "again 0"], "greedy texts come first"
    assert list(single["draws 0"].seeds) == list(range(5, 15)) and not single["draws 0"].together
    several = jobs_of(BATCHED, pair, [SAMPLING, SAMPLING], 10, seed=5)
    assert {"batch", "batch 0", "batch 1"} <= set(several) and several["draws 1"].together
    assert several["batch 0"].together and not several["alone 0"].together


def test_the_limit_is_passed_by_few_exact_experiments(pair: Pair) -> None:
    joint = exact_joint(pair.logits, SAMPLING)
    limit = distance_limit(joint, 500, trials=1000)
    source = np.random.default_rng(9)
    found = [0.5 * np.abs(source.multinomial(500, joint.ravel()) / 500 - joint.ravel()).sum() for _ in range(300)]
    assert np.mean(np.asarray(found) > limit) < 0.02 and np.median(found) < limit < 2 * np.median(found)
