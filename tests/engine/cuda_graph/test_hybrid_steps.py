"""CUDA-graph steps of models with recurrent layers: texts, capture safety, and rows that cannot go back."""

from __future__ import annotations

from typing import Any

import pytest
from oracles import hybrid_models, models
from oracles.capture_guard import check_repeats, guard_programs

from specdec_fast import Engine, HuggingFaceTarget, SamplingParams, get_drafter

PROMPTS = ([0, 5, 6, 7, 8], [11, 12, 13], [1], [40] * 9)
PARAMS = [
    SamplingParams(temperature=each, seed=3 + at, max_new_tokens=18 - 4 * at, ignore_eos=True)
    for at, each in enumerate((0.0, 0.7, 0.0, 1.0))
]


def texts(engine: Engine) -> list[list[int]]:
    return [list(handle.tokens) for handle in engine.generate([list(each) for each in PROMPTS], PARAMS)]


def drafter() -> Any:
    small = HuggingFaceTarget(models.kin("llama"), max_rows=5, max_length=320)
    return get_drafter("draft_model")(small, num_draft_tokens=3, pick="coupled")


@pytest.mark.parametrize("family", hybrid_models.MIXERS.values())
def test_a_step_can_be_captured_and_texts_are_those_of_plain_decoding(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four requests end at different times, so that rows without nodes run beside others."""
    target = HuggingFaceTarget(hybrid_models.model(family), max_rows=5)
    want = texts(Engine(target))
    runs = guard_programs(monkeypatch)
    for made in (None, drafter()):
        engine = Engine(target, made, step_mode="graph")
        assert texts(engine) == want
        assert engine.step_mode == "graph" and engine._failures.last is None
    names = check_repeats(runs)
    assert "specdec.exact_match_verify.default" in names
    target.close()


@pytest.mark.parametrize("family", ["qwen3_next", "mamba"])
@pytest.mark.parametrize("after", ["target", "states", "commit"])
def test_rows_whose_states_are_ahead_are_computed_again(
    family: str, after: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, faults: Any
) -> None:
    """A step fails before the cache has moved, between its states and its lengths, or after it. Texts stay."""
    target = HuggingFaceTarget(hybrid_models.model(family), max_rows=5)
    want = texts(Engine(target))
    engine = Engine(target, drafter(), step_mode="graph")
    places: dict[str, tuple[Any, str]] = {
        "target": (target, "score"), "states": (target.cache.recurrent, "commit"), "commit": (target.cache, "commit"),
    }  # fmt: skip
    owner, name = places[after]
    own, calls = getattr(owner, name), []

    def failing(*given: Any, **named: Any) -> Any:
        found = own(*given, **named)
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("out of resources")
        return found

    monkeypatch.setattr(owner, name, failing)
    assert texts(engine) == want
    assert "out of resources" in str(engine._failures.last)
    target.close()
