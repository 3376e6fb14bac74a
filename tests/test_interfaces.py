"""The interfaces: what we ship satisfies its protocols, and packages load without heavy imports."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from oracles.automaton import AutomatonTarget, random_logits
from oracles.noisy_oracle import NoisyChain, NoisyTree

import specdec_fast
from specdec_fast import Engine, SamplingParams, get_drafter, get_rule
from specdec_fast.cache import PagedCache
from specdec_fast.drafters import drafter_names
from specdec_fast.interfaces import Drafter, KVCache, Needs, Rule, Target, has_thresholds
from specdec_fast.lab.text_positions import Recorder
from specdec_fast.rules import rule_names


def test_what_we_ship_satisfies_its_protocols() -> None:
    target = AutomatonTarget(random_logits(5, 7))
    assert isinstance(target, Target) and isinstance(target.cache, KVCache) and isinstance(target.cache, PagedCache)
    for name in rule_names():
        rule = get_rule(name)
        assert isinstance(rule, Rule) and rule.name == name
        assert rule.lossless == (name != "lossy")
        assert rule.uses_q == (name not in ("greedy", "replay", "lossy"))
        assert rule.replays == (name in ("greedy", "replay"))
        assert rule.prefers == {"greedy": "greedy", "lossy": "greedy", "replay": "coupled"}.get(name, "sampled")
        assert has_thresholds(rule) == has_thresholds(Recorder(rule)) == (not rule.replays)
    for oracle in (NoisyChain([], 0.5, 7), NoisyTree([], 0.5, 7)):
        assert isinstance(oracle, Drafter)


def test_drafters_state_their_name_and_needs() -> None:
    assert {"draft_model", "ngram"} <= set(drafter_names())
    for name in drafter_names():
        kind = get_drafter(name)
        assert kind.name == name
        for verb in ("begin", "propose", "observe", "release"):
            assert callable(getattr(kind, verb))


@pytest.mark.parametrize(("get", "what"), [(get_drafter, "drafter"), (get_rule, "rule")])
def test_unknown_names_list_what_there_is(get, what: str) -> None:
    with pytest.raises(ValueError, match=f"{what}: got 'nothing'; expected one of") as error:
        get("nothing")
    assert ("ngram" if what == "drafter" else "replay") in str(error.value)


def test_a_rule_object_is_taken_as_it_is() -> None:
    rule = get_rule("rejection")
    assert get_rule(rule) is rule and get_rule().name == "replay"


def test_needs_decide_what_a_rule_takes() -> None:
    assert get_rule("rejection").why_not(Needs(topology="chain")) is None
    assert "trees" in str(get_rule("rejection").why_not(Needs(topology="tree")))
    assert get_rule("replay").why_not(Needs(topology="tree")) is None
    with pytest.raises(ValueError, match=r"rule rejection: got drafter .*, which proposes trees; expected chains"):
        Engine(AutomatonTarget(random_logits(5, 7)), NoisyTree([], 0.5, 7), rule="rejection")


def test_the_public_names_exist() -> None:
    for name in specdec_fast.__all__:
        assert getattr(specdec_fast, name) is not None
    with pytest.raises(AttributeError):
        specdec_fast.nothing  # noqa: B018


def test_importing_the_package_loads_neither_torch_models_nor_the_engine() -> None:
    program = (
        "import sys, specdec_fast, specdec_fast.engine.engine\n"
        "heavy = {'transformers', 'triton', 'specdec_kernels._C'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_foreign_target_and_drafter_need_no_base_class() -> None:
    """The two stubs used all over these tests, run through the engine."""
    target = AutomatonTarget(random_logits(11, 6))
    plain = Engine(target).generate([[1, 2]], SamplingParams(seed=3, max_new_tokens=12))[0]
    drafted = Engine(
        AutomatonTarget(random_logits(11, 6)), NoisyTree([[1, 2, *plain.tokens]], 0.8, 6), rule="replay"
    ).generate([[1, 2]], SamplingParams(seed=3, max_new_tokens=12))[0]
    assert plain.tokens == drafted.tokens and drafted.stats.steps < plain.stats.steps
    assert torch.equal(target.cache.lengths, torch.zeros(8, dtype=torch.int32))
