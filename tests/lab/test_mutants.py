"""Every known mistake is killed, by checks that the same code without the mistake passes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from oracles.planted_rules import place as invented

from specdec_fast.lab.draw_counts import TEXT, WHOLE, Drawing
from specdec_fast.lab.mutant_rules import MUTANTS, RIGHT, Mutant, World, world
from specdec_fast.lab.mutants import SEEDS, dist_of, distance, judge, planted_folder, run_planted, true_dist
from specdec_fast.lab.statistics import chi_square, draws_needed
from specdec_fast.rules import get_rule

ONLY_JOINT = {
    "bonus without temperature",
    "stale keys and values",
    "rejected draft is penalised",
    "distribution of the wrong parent",
    "end of sequence inside a block",
    "block rule with the token residual",
}


@pytest.mark.parametrize("name", RIGHT)
def test_the_right_rules_pass(name: str) -> None:
    for seed in SEEDS:
        place = world(3, seed)
        for length in (1, 3):
            assert distance(dist_of(RIGHT[name], place, length), true_dist(place.p, length)) < 1e-14


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_mutant_is_killed(mutant: Mutant) -> None:
    found = judge(mutant)
    assert found.killed and "exact, joint" in found.killers
    assert found.joint > 1e-9 and found.draws_joint < 1e9
    # a first-token test alone is blind for these: the reason for joint distributions
    assert ("exact, first token" not in found.killers) == (mutant.name in ONLY_JOINT)


def test_there_are_enough_of_them_and_each_only_once() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(names) >= 25 and len(set(names)) == len(names) and names and set(names) >= ONLY_JOINT


def test_a_mutant_without_its_mistake_survives() -> None:
    assert not judge(Mutant("none", "", RIGHT["token rule"])).killed


@pytest.mark.parametrize("name", ["redraw from p after a rejection", "stale keys and values"])
def test_the_power_is_real(name: str) -> None:
    """As many draws as the matrix says, every fourth a whole text, reject on the model that shows it best."""
    mutant = next(mutant for mutant in MUTANTS if mutant.name == name)
    needed = int(judge(mutant).draws_joint / WHOLE) + 1
    best = 0.0
    for seed in SEEDS:
        place = world(3, seed)
        wrong, right = dist_of(mutant.step, place, 3), true_dist(place.p, 3)
        texts = sorted(wrong.keys() | right.keys())
        a, b = (np.array([dist.get(text, 0.0) for text in texts]) for dist in (wrong, right))
        source = np.random.default_rng(0)
        rejected = [chi_square(source.multinomial(needed, a / a.sum()), b / b.sum()).p_value < 1e-3 for _ in range(40)]
        best = max(best, float(np.mean(rejected)))
    assert best > 0.85


def test_joint_distributions_are_seen_by_the_texts_that_a_run_has() -> None:
    """A run's whole texts are fewer than its draws: what they cannot see, its chi-square test does not kill."""
    mutant = next(
        mutant for mutant in MUTANTS if mutant.name == "stale keys and values"
    )  # of the joint distribution alone
    needed = judge(mutant).draws_joint
    place = min((world(3, seed) for seed in SEEDS), key=lambda place: _texts_needed(mutant, place))
    assert needed == pytest.approx(WHOLE * _texts_needed(mutant, place))
    assert "chi-square, joint" in judge(mutant, draws=int(needed) + 1).killers
    assert "chi-square, joint" not in judge(mutant, draws=int(needed) - 1).killers
    drawing = Drawing(invented(3), get_rule("rejection"), seed=1)
    drawing.run(WHOLE * 50)
    assert (drawing.counts.first.sum(), drawing.counts.joint.sum()) == (WHOLE * 50, 50)


def _texts_needed(mutant: Mutant, place: World) -> float:
    wrong, right = dist_of(mutant.step, place, TEXT), true_dist(mutant.truth(place), TEXT)
    texts = sorted(wrong.keys() | right.keys())
    return draws_needed(*(np.array([dist.get(text, 0.0) for text in texts]) for dist in (wrong, right)))


def test_planted_tests_are_run_and_read(tmp_path: Path) -> None:
    folder = tmp_path / "tests" / "mutants"
    folder.mkdir(parents=True)
    (folder / "test_a.py").write_text("def test_killed(): pass\ndef test_alive(): assert False\n")
    found = {each.name: each.passed for each in run_planted(folder)}
    assert found == {"test_killed": True, "test_alive": False}
    (folder / "test_a.py").write_text("")
    with pytest.raises(ValueError, match="got no tests"):
        run_planted(folder)


def test_the_checkout_s_mutants_are_found() -> None:
    folder = planted_folder()
    assert folder is not None and (folder / "test_mutants.py").exists()
