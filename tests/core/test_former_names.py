"""Former names, and names of other engines: errors suggest the name in this package."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest

import specdec_fast
from specdec_fast import Draft, Engine, SamplingParams, get_rule, load, verify
from specdec_fast.core import former_names
from specdec_fast.drafters import make_drafter
from specdec_fast.rules import rule_names
from specdec_fast.targets.huggingface import HuggingFaceTarget
from specdec_fast.targets.tiny_models import tiny_model

PLACES: dict[str, Callable[..., Any]] = {
    "SamplingParams": SamplingParams,
    "Engine.generate": Engine.generate,
    "Engine.encode_chat": Engine.encode_chat,
    "load": load,
    "Draft.trees": Draft.trees,
    "verify": verify,
}


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(HuggingFaceTarget(tiny_model("llama"), max_rows=1, max_length=32))


def refused(call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    with pytest.raises(TypeError) as error:
        call(*args, **kwargs)
    return str(error.value)


@pytest.mark.parametrize(
    ("place", "theirs"), [(place, each) for place, table in former_names.FOREIGN_ARGUMENTS.items() for each in table]
)
def test_an_argument_of_another_engine(place: str, theirs: str) -> None:
    call = PLACES[place]
    args = [] if place == "SamplingParams" else [None, []] if place.startswith("Engine.") else ["demo-target"]
    ours = former_names.FOREIGN_ARGUMENTS[place][theirs]
    if former_names.ACCEPTED_PARAMETERS.get(theirs) == () and place == "SamplingParams":
        assert ours in inspect.signature(SamplingParams).parameters
        return
    words = f"specdec-fast calls this {ours}" if ours.isidentifier() else ours
    assert (
        refused(call, *args, **{theirs: "other"}) == f"{place}() got an unexpected keyword argument {theirs!r}; {words}"
    )
    known = inspect.signature(call).parameters
    assert theirs not in known and (ours in known or not ours.isidentifier())


def test_names_of_other_engines_are_accepted_where_they_mean_the_same() -> None:
    theirs = SamplingParams(
        max_tokens=9, min_tokens=2, stop_strings=["a"], bad_words_ids=[[1, 2]], suppress_tokens=[3], temperature=0.5
    )
    ours = SamplingParams(
        max_new_tokens=9, min_new_tokens=2, stop=["a"], bad_words=[(1, 2)], banned_token_ids=(3,), temperature=0.5
    )
    assert theirs == ours
    with pytest.raises(TypeError, match="got both 'max_tokens' and 'max_new_tokens', which mean the same"):
        SamplingParams(max_tokens=3, max_new_tokens=4)


@pytest.mark.parametrize("theirs", former_names.FOREIGN_ARGUMENTS["SamplingParams"])
def test_parameters_that_ask_for_nothing_are_accepted(theirs: str) -> None:
    for value in (None, *former_names.ACCEPTED_PARAMETERS.get(theirs, ())):
        assert SamplingParams(**{theirs: value}) == SamplingParams()  # type: ignore[arg-type]
    assert former_names.ACCEPTED_PARAMETERS.keys() <= former_names.FOREIGN_ARGUMENTS["SamplingParams"].keys()


def test_an_argument_that_belongs_elsewhere(engine: Engine) -> None:
    start = "Engine.generate() got an unexpected keyword argument "
    said = refused(engine.generate, ["x"], max_tokens=3)
    assert said == f"{start}'max_tokens'; specdec-fast calls this max_new_tokens; pass params=SamplingParams(...)"
    said = refused(engine.generate, ["x"], temperature=0)
    assert said == f"{start}'temperature'; pass params=SamplingParams(temperature=...)"
    said = refused(engine.submit, "x", sampling_params=SamplingParams())
    assert said.endswith("; specdec-fast calls this params")
    said = refused(load, "demo-target", max_tokens=3)
    assert said.endswith("; specdec-fast calls this max_new_tokens, an argument of SamplingParams")
    said = refused(Engine, engine.target, num_speculative_tokens=3)
    assert said.startswith("Engine() ") and said.endswith("calls this num_draft_tokens, an argument of load")


def test_arguments_that_a_method_hands_on_are_explained_where_they_belong(engine: Engine) -> None:
    start = "Engine.encode_chat() got an unexpected keyword argument "
    said = refused(engine.chat, [], chat_template_kwargs={})
    assert said == f"{start}'chat_template_kwargs'; specdec-fast calls this template_options"
    said = refused(engine.submit_chat, [], sampling_params=SamplingParams())
    assert said == f"{start}'sampling_params'; specdec-fast calls this params, an argument of Engine.generate"
    said = refused(engine.chat, [], temperature=0)
    assert said == f"{start}'temperature'; pass params=SamplingParams(temperature=...)"


def test_an_argument_of_two_places_is_explained_for_the_place_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = {"SamplingParams": {"theirs": "seed"}, "load": {"theirs": "device"}}
    monkeypatch.setattr(former_names, "FOREIGN_ARGUMENTS", tables)
    assert former_names.argument_hint("theirs", "load", ["device"]) == "; specdec-fast calls this device"
    assert former_names.argument_hint("theirs", "SamplingParams", ["seed"]) == "; specdec-fast calls this seed"


def test_a_misspelt_argument() -> None:
    said = "SamplingParams() got an unexpected keyword argument 'temprature'; did you mean 'temperature'?"
    assert refused(SamplingParams, temprature=1) == said
    assert refused(SamplingParams, wholly_unknown=1).endswith("'wholly_unknown'")


def test_other_type_errors_stay_as_they_are(engine: Engine) -> None:
    assert refused(SamplingParams, 1.0, temperature=1.0).endswith("got multiple values for argument 'temperature'")
    assert refused(load) == "load() missing 1 required positional argument: 'target'"


def test_an_option_of_a_drafter(engine: Engine) -> None:
    for option, words in (
        ("num_speculative_tokens", "specdec-fast calls this num_draft_tokens"),
        ("n_mix", "did you mean 'n_min'?"),
    ):
        with pytest.raises(ValueError, match="drafter ngram: got option") as error:
            make_drafter("ngram", {option: 3}, target=engine.target)
        assert str(error.value).endswith(f"; {words}")


@pytest.mark.parametrize("theirs", sorted(former_names.FOREIGN_ATTRIBUTES))
def test_a_method_of_another_engine(engine: Engine, theirs: str) -> None:
    ours = former_names.FOREIGN_ATTRIBUTES[theirs]
    assert hasattr(engine, ours.partition(" ")[0].strip(",")) and not hasattr(engine, theirs)
    with pytest.raises(AttributeError) as error:
        getattr(engine, theirs)
    assert str(error.value) == f"'Engine' object has no attribute {theirs!r}; specdec-fast calls this {ours}"


def test_attributes_that_do_not_exist(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AttributeError, match=re.escape("has no attribute 'genrate'; did you mean 'generate'?")):
        engine.genrate  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError, match=r"has no attribute '_queu'$"):
        engine._queu  # type: ignore[attr-defined]  # noqa: B018
    monkeypatch.setattr(Engine, "idle", property(lambda self: self.state.nothing))
    with pytest.raises(AttributeError, match="'DecodeState' object has no attribute 'nothing'"):
        engine.idle  # noqa: B018


@pytest.mark.parametrize("theirs", sorted(former_names.FOREIGN_EXPORTS))
def test_a_class_of_another_engine(theirs: str) -> None:
    ours = former_names.FOREIGN_EXPORTS[theirs]
    assert hasattr(specdec_fast, ours.split()[0].strip(";,"))
    with pytest.raises(AttributeError) as error:
        getattr(specdec_fast, theirs)
    assert str(error.value) == f"module 'specdec_fast' has no attribute {theirs!r}; specdec-fast calls this {ours}"


def test_parameters_are_made_copied_and_shown_as_before() -> None:
    params = SamplingParams(seed=3, stop=("x",))
    assert copy.deepcopy(params) == pickle.loads(pickle.dumps(params)) == params
    assert list(inspect.signature(SamplingParams).parameters)[:2] == ["temperature", "top_k"]


@pytest.mark.parametrize("old", sorted(former_names.RENAMED_RULES))
def test_a_rule_by_its_former_name(old: str) -> None:
    new = former_names.RENAMED_RULES[old]
    with pytest.raises(
        ValueError, match=f"^rule: got '{old}'; expected one of .*; rule '{old}' is now called '{new}'$"
    ):
        get_rule(old)


def test_new_names_exist_and_former_ones_do_not() -> None:
    assert set(former_names.RENAMED_RULES.values()) <= set(rule_names())
    assert not former_names.RENAMED_RULES.keys() & set(rule_names())
    for old, new in former_names.RENAMED_EXPORTS.items():
        with pytest.raises(AttributeError, match=f"{old!r} is now called {new!r}"):
            getattr(specdec_fast, old)
    for old, new in former_names.RENAMED_ARGUMENTS.items():
        assert refused(load, "demo-target", **{old: True}).endswith(f"; {old!r} is now called {new!r}")
