"""The checks of the lab detect every known mistake and pass the same step without the mistake."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from oracles.planted_rules import random_place

from specdec_fast.lab.draw_counts import TEXT, WHOLE, Drawing
from specdec_fast.lab.kill_matrix import SEEDS, distance, emitted_dist, judge, planted_folder, run_planted, true_dist
from specdec_fast.lab.mutant_rules import CORRECT_RULES, MUTANTS, Mutant
from specdec_fast.lab.mutant_states import redraw_with_draft_noise
from specdec_fast.lab.mutant_steps import ModelPair, random_models
from specdec_fast.lab.statistics import chi_square, draws_needed
from specdec_fast.rules import get_rule

ONLY_JOINT = {
    "bonus without temperature",
    "stale keys and values",
    "rejected draft is penalised",
    "distribution of the wrong parent",
    "end of sequence inside a block",
    "block rule with the rejection residual",
    "state of rejected tokens stays",
    "state column 0 after a step without drafts",
    "rollback is applied again",
    "ranks draw their own seeds",
}


@pytest.mark.parametrize("name", CORRECT_RULES)
def test_correct_rules_pass(name: str) -> None:
    for seed in SEEDS:
        models = random_models(3, seed)
        for length in (1, 3):
            assert distance(emitted_dist(CORRECT_RULES[name], models, length), true_dist(models.p, length)) < 1e-14


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_mutant_is_killed(mutant: Mutant) -> None:
    found = judge(mutant)
    assert found.killed and "exact, joint" in found.killers
    assert found.joint > 1e-9 and found.draws_joint < 1e9
    # the first-token test cannot detect these mutants, so the lab also tests joint distributions
    assert ("exact, first token" not in found.killers) == (mutant.name in ONLY_JOINT)
    assert (mutant.noticed_by == "joint distribution") == (mutant.name in ONLY_JOINT)


@pytest.mark.parametrize("seed", range(4))
def test_noise_that_is_used_twice_has_the_stated_distribution(seed: int) -> None:
    """The closed form of the mutant against draws."""
    source = np.random.default_rng(seed)
    p, q = (source.dirichlet(np.ones(3)) for _ in range(2))
    noise = source.gumbel(size=(400_000, 3))
    drafted = (np.log(q) + noise).argmax(1)
    with np.errstate(divide="ignore"):
        again = (np.log(np.maximum(p - q, 0)) + noise).argmax(1)
    for token in range(3):
        if p[token] < q[token]:
            seen = np.bincount(again[drafted == token], minlength=3) / max((drafted == token).sum(), 1)
            assert np.allclose(seen, redraw_with_draft_noise(p.tolist(), q.tolist(), token), atol=8e-3)


def test_mutants_have_unique_names() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(names) >= 25 and len(set(names)) == len(names) and names and set(names) >= ONLY_JOINT


def test_a_mutant_without_its_mistake_survives() -> None:
    assert not judge(Mutant("none", "", "", CORRECT_RULES["rejection"])).killed


@pytest.mark.parametrize("name", ["recovered token from p", "stale keys and values"])
def test_the_power_is_real(name: str) -> None:
    """The number of draws in the kill matrix is enough to reject on the most sensitive model."""
    mutant = next(mutant for mutant in MUTANTS if mutant.name == name)
    needed = int(judge(mutant).draws_joint / WHOLE) + 1
    best = 0.0
    for seed in SEEDS:
        models = random_models(3, seed)
        wrong, right = emitted_dist(mutant.step, models, 3), true_dist(models.p, 3)
        texts = sorted(wrong.keys() | right.keys())
        a, b = (np.array([dist.get(text, 0.0) for text in texts]) for dist in (wrong, right))
        source = np.random.default_rng(0)
        rejected = [chi_square(source.multinomial(needed, a / a.sum()), b / b.sum()).p_value < 1e-3 for _ in range(40)]
        best = max(best, float(np.mean(rejected)))
    assert best > 0.85


def test_the_joint_test_counts_only_whole_texts() -> None:
    """Only every WHOLE-th draw of a run is a whole text, so the joint test needs WHOLE times as many draws."""
    mutant = next(mutant for mutant in MUTANTS if mutant.name == "stale keys and values")
    needed = judge(mutant).draws_joint
    models = min((random_models(3, seed) for seed in SEEDS), key=lambda models: _texts_needed(mutant, models))
    assert needed == pytest.approx(WHOLE * _texts_needed(mutant, models))
    assert "chi-square, joint" in judge(mutant, draws=int(needed) + 1).killers
    assert "chi-square, joint" not in judge(mutant, draws=int(needed) - 1).killers
    drawing = Drawing(random_place(3), get_rule("rejection"), seed=1)
    drawing.run(WHOLE * 50)
    assert (drawing.counts.first.sum(), drawing.counts.joint.sum()) == (WHOLE * 50, 50)


def _texts_needed(mutant: Mutant, models: ModelPair) -> float:
    wrong, right = emitted_dist(mutant.step, models, TEXT), true_dist(mutant.truth(models), TEXT)
    texts = sorted(wrong.keys() | right.keys())
    return draws_needed(*(np.array([dist.get(text, 0.0) for text in texts]) for dist in (wrong, right)))


def test_planted_mutants_run_in_pytest(tmp_path: Path) -> None:
    folder = tmp_path / "tests" / "mutants"
    folder.mkdir(parents=True)
    (folder / "test_a.py").write_text("def test_killed(): pass\ndef test_alive(): assert False\n")
    found = {each.name: each.passed for each in run_planted(folder)}
    assert found == {"test_killed": True, "test_alive": False}
    (folder / "test_a.py").write_text("")
    with pytest.raises(ValueError, match="got no tests"):
        run_planted(folder)


def test_the_mutants_of_the_checkout_are_found() -> None:
    folder = planted_folder()
    assert folder is not None and (folder / "test_mutants.py").exists()
