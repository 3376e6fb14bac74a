"""Why a model could not be loaded, in words with a remedy."""

from __future__ import annotations

from pathlib import Path

import pytest
from oracles import models

from specdec_fast import load
from specdec_fast.loading import load_model
from specdec_fast.loading.model_options import ModelOptions
from specdec_fast.targets.model_support import UnsupportedModelError


def test_models_of_other_kinds_are_refused(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, T5ForConditionalGeneration

    shape = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    T5ForConditionalGeneration(AutoConfig.for_model("t5", **shape)).save_pretrained(tmp_path / "t5")
    kind = (
        r"an encoder-decoder \(T5ForConditionalGeneration\); expected a decoder-only causal language model; choose one"
    )
    with pytest.raises(UnsupportedModelError, match=rf"^model: got '.*t5', {kind}"):
        load(tmp_path / "t5")
    AutoConfig.for_model("vit", hidden_size=16).save_pretrained(tmp_path / "vit")
    with pytest.raises(UnsupportedModelError, match=r"^model: got '.*vit', a vit; expected a decoder-only causal"):
        load(tmp_path / "vit")
    small = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "attention_hidden_size": 16}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("rwkv", **small)).save_pretrained(tmp_path / "rwkv")
    recurrent = (
        "RwkvForCausalLM: got a model with recurrent state in RwkvBlock at .*, but no mixer .*; choose another model"
    )
    with pytest.raises(UnsupportedModelError, match=f"^model: {recurrent}"):
        load(tmp_path / "rwkv")
    with pytest.raises(ValueError, match=f"^drafter draft_model: draft: {recurrent}"):
        load(models.own("llama"), tmp_path / "rwkv", max_length=64)


class Refused:
    """from_pretrained that fails with an error."""

    def __init__(self, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
        self.error = error
        monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", self)

    def __call__(self, *_: object, **__: object) -> None:
        raise self.error


def test_a_repository_of_gguf_files_is_told_how_to_name_one(monkeypatch: pytest.MonkeyPatch) -> None:
    Refused(OSError("owner/name does not appear to have a file named config.json. Checkout ..."), monkeypatch)
    words = "does not appear to have a file named config.json.*; if it has GGUF files, name one: owner/name:FILE.gguf"
    with pytest.raises(ValueError, match=words):
        load_model("owner/name")


def test_a_hub_that_is_out_of_reach_says_how_to_work_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    Refused(OSError("We couldn't connect to 'https://huggingface.co'"), monkeypatch)
    with pytest.raises(
        ValueError, match=r"to work offline, download it first and name the folder\): We couldn't connect"
    ):
        load_model("owner/name")


def test_a_folder_is_not_looked_up_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Refused(OSError(""), monkeypatch)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r", a folder that transformers cannot load: OSError; expected"):
        load_model(tmp_path)


def test_a_refused_engine_leaves_its_models_as_they_were() -> None:
    model, draft = models.own("llama"), models.kin("llama").train()
    before = [(each.config._attn_implementation, type(each.lm_head), each.training) for each in (model, draft)]
    tokenizer = object()
    for arguments in ({"eos_token_ids": [99]}, {"drafter_options": {"pick": "no"}}, {"tokenizer": tokenizer}):
        with pytest.raises((ValueError, TypeError, AttributeError)):
            load(model, draft, max_length=64, **arguments)
        after = [(each.config._attn_implementation, type(each.lm_head), each.training) for each in (model, draft)]
        assert after == before, arguments


def test_a_quantization_that_fails_is_named_in_place_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import BitsAndBytesConfig

    Refused(ImportError("Using `bitsandbytes` 8-bit quantization requires bitsandbytes"), monkeypatch)
    words = (
        r"model_options: got quantization_config=BitsAndBytesConfig for 'demo-target': Using `bitsandbytes`.*; expected"
    )
    with pytest.raises(ValueError, match=words):
        load_model("demo-target", options=ModelOptions(more={"quantization_config": BitsAndBytesConfig()}))
    Refused(ValueError("Unrecognized configuration class T5Config"), monkeypatch)
    with pytest.raises(UnsupportedModelError, match="expected a decoder-only"):
        load_model("demo-target", options=ModelOptions(more={"quantization_config": BitsAndBytesConfig()}))


def test_model_options_are_blamed_for_arguments_that_were_given(monkeypatch: pytest.MonkeyPatch) -> None:
    error = TypeError("Model.__init__() got an unexpected keyword argument 'foo'")
    Refused(error, monkeypatch)
    for name in ("demo-target", "owner/name"):
        with pytest.raises(ValueError, match=r"^model_options: .*'foo'; expected arguments of from_pretrained"):
            load_model(name, options=ModelOptions(more={"foo": 1}))
    with pytest.raises(ValueError, match=r"^model: got 'demo-target', a folder that transformers cannot load"):
        load_model("demo-target")  # code of the checkpoint passed it
