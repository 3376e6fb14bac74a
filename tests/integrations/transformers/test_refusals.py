"""What an attached model cannot do: one message without a fallback, and transformers' own result with it."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracles import models
from oracles.scaled_rotary import LIMIT, scaled_model

from specdec_fast.integrations.transformers import RefusedCallError, attach, attached
from specdec_fast.targets.tiny_models import tiny_model

IDS = torch.tensor([[5, 6, 7, 8], [9, 8, 7, 5]])


def cache_of(model: Any) -> Any:
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


CALLS: dict[str, tuple[Callable[[Any], dict[str, Any]], str]] = {
    "beams": (lambda model: {"num_beams": 2}, r"got beam search \(num_beams\); expected greedy"),
    "sampled beams": (lambda model: {"num_beams": 2, "do_sample": True, "top_k": 1}, "got beam search"),
    "assistant": (
        lambda model: {"assistant_model": copy.deepcopy(model), "row": 1},
        "got assistant_model; expected none",
    ),
    "prompt lookup": (
        lambda model: {"prompt_lookup_num_tokens": 2, "row": 1},
        "got prompt_lookup_num_tokens; expected none",
    ),
    "embeddings": (
        lambda model: {"inputs_embeds": model.get_input_embeddings()(IDS), "input_ids": None},
        "got inputs_embeds; expected input_ids",
    ),
    "cache": (
        lambda model: {"past_key_values": cache_of(model)},
        r"got (past_key_values|a cache \(past_key_values\)); expected none",
    ),
    "own loop": (lambda model: {"custom_generate": own_loop}, "got custom_generate, a decoding loop of its own"),
    "hidden states": (
        lambda model: {"output_hidden_states": True, "return_dict_in_generate": True},
        "got output_hidden_states=True; expected False",
    ),
    "attentions": (
        lambda model: {"output_attentions": True, "return_dict_in_generate": True},
        "got output_attentions=True; expected False",
    ),
    "guidance": (lambda model: {"guidance_scale": 1.5}, "UnbatchedClassifierFreeGuidanceLogitsProcessor, which runs"),
    "right padding": (
        lambda model: {"attention_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])},
        "got prompts that end with padding; expected padding on the left",
    ),
    "positions": (
        lambda model: {"position_ids": torch.tensor([[3, 4, 5, 6]]).expand(2, 4)},
        "got position_ids of its own; expected none",
    ),
    "synced": (lambda model: {"synced_gpus": True}, "got synced_gpus=True; expected False"),
    "too long": (
        lambda model: {"max_new_tokens": 40},
        r"got up to 44 tokens .* at most 32 \(pass max_length to attach\)",
    ),
}
ONLY_REFUSED = {"synced"}
"""Calls that transformers itself can only run among several processes."""


def own_loop(model: Any, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
    """A decoding loop of a user: it runs the model's own forward."""
    return torch.cat([input_ids, model(input_ids).logits[:, -1:].argmax(-1)], 1)


def call(model: Any, settings: dict[str, Any]) -> Any:
    given = {"input_ids": IDS, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, **settings}
    rows = given.pop("row", len(IDS))
    given["input_ids"] = None if given["input_ids"] is None else IDS[:rows]
    found = model.generate(**given)
    return found if isinstance(found, torch.Tensor) else found.sequences


@pytest.fixture(scope="module")
def model() -> Any:
    return attach(tiny_model("llama"), drafter="ngram", max_length=32)


@pytest.fixture(scope="module")
def falling_back() -> Any:
    return attach(tiny_model("llama"), drafter="ngram", max_length=32, fallback="transformers")


@pytest.mark.parametrize("name", CALLS)
def test_one_message_says_what_was_got_what_is_expected_and_a_way(name: str, model: Any) -> None:
    settings, words = CALLS[name]
    with pytest.raises(RefusedCallError, match=words) as raised:
        call(model, settings(model))
    assert "pass fallback='transformers' to attach" in str(raised.value)
    assert len(call(model, {})) == 2


@pytest.mark.parametrize(
    ("kind", "lengths", "new"), [("phi3", (4, 9), 40), ("phi3", (9, 60), 5), ("dynamic", (60,), 9)]
)
def test_texts_whose_rotary_frequencies_change_on_the_way(kind: str, lengths: tuple[int, ...], new: int) -> None:
    """A text that crosses the switch, a batch with prompts of both sides, and a scaling that moves with each token."""
    model, width = attach(scaled_model(kind), max_length=LIMIT), max(lengths)
    ids = torch.tensor([[0] * (width - length) + models.prompt(length) for length in lengths])
    given = {"attention_mask": (ids != 0).long(), "do_sample": False, "pad_token_id": 0}
    with pytest.raises(RefusedCallError, match=r"expected at most 40, since transformers changes the rotary"):
        model.generate(ids, max_new_tokens=new, **given)
    other = attach(scaled_model(kind), max_length=LIMIT, fallback="transformers")
    own = scaled_model(kind)
    assert torch.equal(other.generate(ids, max_new_tokens=new, **given), own.generate(ids, max_new_tokens=new, **given))
    assert attached(other).engine.stats.steps == 0


@pytest.mark.parametrize(
    ("kind", "lengths", "new"), [("phi3", (4, 9), 31), ("phi3", (41, 60), 9), ("dynamic", (9,), 31)]
)
def test_texts_on_one_side_of_a_switch_are_decoded(kind: str, lengths: tuple[int, ...], new: int) -> None:
    model, own, width = attach(scaled_model(kind), max_length=LIMIT), scaled_model(kind), max(lengths)
    ids = torch.tensor([[0] * (width - length) + models.prompt(length) for length in lengths])
    given = {"attention_mask": (ids != 0).long(), "do_sample": False, "pad_token_id": 0, "max_new_tokens": new}
    assert torch.equal(model.generate(ids, **given), own.generate(ids, **given))
    assert attached(model).engine.stats.steps > 0


@pytest.mark.parametrize("name", [name for name in CALLS if name not in ONLY_REFUSED])
def test_transformers_runs_what_is_handed_on(name: str, falling_back: Any, caplog: pytest.LogCaptureFixture) -> None:
    stock = tiny_model("llama")
    settings, _ = CALLS[name]
    expected = call(stock, settings(stock))
    steps = attached(falling_back).engine.stats.steps
    with caplog.at_level(logging.WARNING, "specdec_fast"):
        for _ in range(2):
            assert torch.equal(call(falling_back, settings(stock)), expected)
    assert attached(falling_back).engine.stats.steps == steps, "the engine decoded"
    ours = [record for record in caplog.records if record.name == "specdec_fast"]
    assert len(ours) <= 1 and all("transformers runs such calls" in record.message for record in ours)
    assert torch.equal(call(falling_back, {}), call(stock, {}))
    assert attached(falling_back).engine.stats.steps > steps, "the engine did not decode"


def test_a_streamer_works_where_transformers_decodes(falling_back: Any) -> None:
    class Recorder:
        def __init__(self) -> None:
            self.got: list[Any] = []

        def put(self, value: torch.Tensor) -> None:
            self.got.append(value.tolist())

        def end(self) -> None:
            self.got.append("end")

    records = []
    for model in (falling_back, tiny_model("llama")):
        recorder = Recorder()
        model.generate(IDS[:1], max_new_tokens=5, do_sample=False, guidance_scale=1.5, streamer=recorder)
        records.append(recorder.got)
    assert records[0] == records[1]
    assert records[0][-1] == "end"


def test_deprecated_modes_are_refused_before_anything_is_downloaded(model: Any) -> None:
    for settings in (
        {"penalty_alpha": 0.6, "top_k": 4},
        {"dola_layers": "low"},
        {"num_beams": 4, "num_beam_groups": 2},
    ):
        with pytest.raises(RefusedCallError, match="expected greedy decoding or sampling"):
            call(model, settings)


ERRORS: dict[str, dict[str, Any]] = {
    "unknown argument": {"nonsense": 3},
    "no tokenizer": {"stop_strings": ["a"]},
    "greedy copies": {"num_return_sequences": 2},
    "no new token": {"max_length": 3, "max_new_tokens": None},
    "deep mask": {"attention_mask": torch.ones(2, 1, 4, 4)},
    "streamed batch": {"streamer": None},
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_of_transformers_stay_what_they_are(name: str, model: Any) -> None:
    from transformers import TextStreamer

    settings = {key: TextStreamer(None) if key == "streamer" else value for key, value in ERRORS[name].items()}
    messages = []
    for each in (model, tiny_model("llama")):
        with pytest.raises(ValueError) as raised:
            call(each, settings)
        messages.append(str(raised.value))
    assert messages[0] == messages[1]


HARMLESS: dict[str, dict[str, Any]] = {
    "no cache": {"use_cache": False},
    "static cache": {"cache_implementation": "static"},
    "usual positions": {"position_ids": torch.arange(4).expand(2, 4)},
    "unread outputs": {"output_hidden_states": True},
    "no streamer": {"streamer": None, "assistant_model": None, "custom_generate": None, "synced_gpus": False},
}


@pytest.mark.parametrize("name", HARMLESS)
def test_settings_that_change_no_token_are_accepted(name: str, model: Any) -> None:
    assert torch.equal(call(model, HARMLESS[name]), call(model, {}))


def test_nothing_leaks(model: Any) -> None:
    engine = attached(model).engine
    engine.reset_prefix_cache()
    pages: Any = engine.target.cache.pages  # type: ignore[attr-defined]
    assert engine.idle and pages.num_free == pages.num_pages - 1
