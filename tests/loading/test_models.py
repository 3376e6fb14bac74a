"""`load_model`: bundled models and folders, their dtypes, and what is missing or broken."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec_fast import load
from specdec_fast.loading import load_model
from specdec_fast.targets.tiny_models import tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model."""
    place = tmp_path_factory.mktemp("model")
    tiny_model("llama").save_pretrained(place)
    return place


def test_types(folder: Path) -> None:
    assert load_model(folder, "bfloat16").dtype == torch.bfloat16
    assert load_model(folder, torch.float64).dtype == torch.float64
    with pytest.raises(ValueError, match="dtype: got 'int3'; expected one of float32"):
        load(folder, dtype="int3")


@pytest.mark.parametrize("name", ["no/such-model", "/no/such/folder", "not a name"])
def test_unknown_models_list_what_can_be_given(name: str) -> None:
    with pytest.raises(ValueError, match=r"model: got '.*'(, which does not exist)?; expected a bundled name") as error:
        load(name)
    assert name in str(error.value) and "demo-target" in str(error.value) and "folder" in str(error.value)


@pytest.mark.parametrize("name", ["demo-targt", "Demo-Draft", "demo_target"])
def test_a_misspelt_bundled_name_is_not_looked_up_on_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", lambda *_, **__: 1 / 0)
    with pytest.raises(ValueError, match=r"expected a bundled name .*; did you mean 'demo-(target|draft)'"):
        load(name)


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="model: got"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="model: got"):
        load(tmp_path)


def test_a_folder_with_broken_weights(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    words = r"^model: got '.*', a folder that transformers cannot load: .* header.*; expected config.json and weights"
    with pytest.raises(ValueError, match=words):
        load(tmp_path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_attention_heads": 0}, ".*zero.*; .*; correct them, or download them again"),
        ({"hidden_size": "wide"}, ".*'hidden_size': TypeError: .*; correct them, or download them again"),
        ({"num_attention_heads": 3}, ".*: ValueError: The hidden size .* is not a multiple of .*; correct them"),
        ({"model_type": "llama9"}, ".*`llama9`.* does not recognize this architecture.*; update transformers, or"),
    ],
    ids=["no heads", "text for a number", "odd heads", "unknown type"],
)
def test_any_error_of_a_config_is_reported(folder: Path, tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(ValueError, match=rf"^model: got '.*', a folder that transformers cannot load: {reason}"):
        load_model(tmp_path)


def test_unused_weights_are_reported(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as the biases of a model whose config has none: its text would be wrong in silence."""
    monkeypatch.setattr(logging.getLogger("specdec_fast"), "propagate", True)
    load_model(folder)
    assert not [each for each in caplog.records if each.name == "specdec_fast"]
    tiny_model("llama", attention_bias=True).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "attention_bias": False}))
    load_model(tmp_path)
    (record,) = (each for each in caplog.records if each.name == "specdec_fast")
    assert "LlamaForCausalLM does not use 8 tensors" in record.message and "k_proj.bias" in record.message


def test_bundled_models_load_without_progress_bars(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.enable_progress_bar()
    try:
        model = load_model("demo-draft")
        assert capfd.readouterr().err == "" and logging.is_progress_bar_enabled()
        model.save_pretrained(tmp_path)
        load_model(tmp_path)
        assert "Loading weights" in capfd.readouterr().err, "other models take a while, and keep theirs"
    finally:
        (logging.enable_progress_bar if shown else logging.disable_progress_bar)()
