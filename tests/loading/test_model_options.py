"""Options of from_pretrained: revision, trust, devices and what else people pass, for models and tokenizers."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import models
from oracles.toy_tokenizer import byte_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdec_fast import SamplingParams, load
from specdec_fast.loading import ModelOptions, load_model, load_tokenizer
from specdec_fast.targets.tiny_models import tiny_model

TOKENIZER = byte_tokenizer()
VOCAB = len(TOKENIZER)
GREEDY = SamplingParams(temperature=0, max_new_tokens=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("target")
    tiny_model("llama", vocab_size=VOCAB, eos_token_id=VOCAB - 1).save_pretrained(place)
    TOKENIZER.save_pretrained(place)
    return place


class Asked:
    """Records what from_pretrained of models and tokenizers is asked for, and answers from a folder."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.models: list[tuple[str, dict[str, Any]]] = []
        self.tokenizers: list[tuple[str, dict[str, Any]]] = []
        for kind, calls in ((AutoModelForCausalLM, self.models), (AutoTokenizer, self.tokenizers)):
            monkeypatch.setattr(kind, "from_pretrained", self._answer(kind.from_pretrained, calls, folder))

    @staticmethod
    def _answer(own: Any, calls: list[Any], folder: Path) -> Any:
        def from_pretrained(place: Any, **options: Any) -> Any:
            calls.append((str(place), options))
            kept = {name: value for name, value in options.items() if name in ("dtype", "output_loading_info")}
            return own(folder, **kept)

        return from_pretrained


def test_options_reach_transformers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(folder, monkeypatch)
    more = {"subfolder": "inner", "token": "t", "local_files_only": True, "use_safetensors": True}
    load("owner/name", revision="v1", trust_remote_code=True, model_options=more, max_length=64)
    ((place, model),), ((_, tokenizer),) = asked.models, asked.tokenizers
    assert place == "owner/name" and {name: model[name] for name in more} == more
    assert tokenizer == {name: more[name] for name in ("subfolder", "token", "local_files_only")} | {
        "revision": "v1",
        "trust_remote_code": True,
    }
    assert model["revision"] == "v1" and model["trust_remote_code"] is True and "device_map" not in model


def test_models_and_their_drafts_have_options_of_their_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(folder, monkeypatch)
    draft = {"revision": "v2", "token": "d"}
    load("a/target", "a/draft", revision="v1", draft_model_options=draft, tokenizer="a/words", max_length=64)
    assert [(place, each["revision"]) for place, each in asked.models] == [("a/target", "v1"), ("a/draft", "v2")]
    assert [place for place, _ in asked.tokenizers] == ["a/words", "a/draft"]
    assert "revision" not in asked.tokenizers[0][1], "a revision belongs to one repository"
    assert all(each["trust_remote_code"] is False for _, each in asked.models + asked.tokenizers)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"model_options": {"torch_dtype": "auto"}},
            "model_options: got 'torch_dtype', which `load` sets; pass dtype=",
        ),
        ({"model_options": {"attn_implementation": "sdpa"}}, "got 'attn_implementation', .* an attention of its own"),
        ({"model_options": {"gguf_file": "x"}}, "got 'gguf_file', .* name the file in place of the folder"),
        (
            {"draft_model_options": {"token": "t"}},
            "draft_model_options: got .* and no draft model; expected draft=MODEL",
        ),
        (
            {"draft": "a/draft", "draft_model_options": {"dtype": "auto"}},
            "draft_model_options: got 'dtype', which `load` sets",
        ),
        ({"revision": "a", "model_options": {"revision": "b"}}, "model_options: got 'revision' a second time"),
        ({"device_map": "auto", "device": "cuda"}, "device"),
    ],
)
def test_options_that_contradict(arguments: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: 1 / 0)
    with pytest.raises(ValueError, match=message):
        load("owner/name", **arguments)


def test_a_device_map_and_a_device_contradict() -> None:
    with pytest.raises(
        ValueError, match="device_map: got 'auto' and device 'cuda'; expected one of them; leave device"
    ):
        ModelOptions(device_map="auto").check("cuda")


@pytest.mark.parametrize("arguments", [{"revision": "a"}, {"device_map": "cpu"}, {"model_options": {"token": "t"}}])
def test_objects_take_no_options(arguments: dict[str, Any]) -> None:
    name = next(iter(arguments.get("model_options", arguments)))
    with pytest.raises(ValueError, match=f"{name}: got it beside a loaded model; expected the name of a model"):
        load(models.own("llama"), **arguments)
    with pytest.raises(ValueError, match="token: got it beside a loaded model"):
        load(models.own("llama"), models.kin("llama"), draft_model_options={"token": "t"}, max_length=64)


# -- devices --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("places", ["cpu", "auto", {"": "cpu"}])
def test_a_device_map_places_the_model(places: Any, folder: Path) -> None:
    pytest.importorskip("accelerate")
    want = load(folder, max_length=64).generate(["the thing"], GREEDY)[0].tokens
    engine = load(folder, device_map=places, max_length=64)
    assert engine.generate(["the thing"], GREEDY)[0].tokens == want
    (placed,) = {str(weight.device) for weight in engine.target.model.parameters()}
    assert placed == "cpu"


@pytest.mark.parametrize("places", ["everywhere", {"": "cuda:7"}])
def test_a_device_map_of_other_places_is_refused(places: Any, folder: Path) -> None:
    pytest.importorskip("accelerate")
    with pytest.raises(
        ValueError, match=r"^device_map: got .* for '.*': .*; expected 'auto', a device of this machine, o"
    ):
        load(folder, device_map=places)


def test_a_device_map_needs_a_package(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(ValueError, match=r"device_map: accelerate is not installed; .*\[device-map\]"):
        load(folder, device_map="auto")


def test_half_the_layers_on_disk(folder: Path, tmp_path: Path) -> None:
    """Served or refused in words; the rest is the target's."""
    pytest.importorskip("accelerate")
    places = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    places |= {"model.layers.0": "cpu", "model.layers.1": "disk"}
    try:
        engine = load(folder, device_map=places, model_options={"offload_folder": tmp_path}, max_length=64)
    except ValueError as error:
        assert str(error).startswith("model: ")
    else:
        want = load(folder, max_length=64).generate(["the thing"], GREEDY)[0].tokens
        assert engine.generate(["the thing"], GREEDY)[0].tokens == want


# -- code that comes with a checkpoint ------------------------------------------------------------------------------


@pytest.fixture
def custom(folder: Path, tmp_path: Path) -> Path:
    """A checkpoint with code: its model is a Llama by another name, and importing it leaves a file."""
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    auto = {"AutoConfig": "own_code.OwnConfig", "AutoModelForCausalLM": "own_code.OwnForCausalLM"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "own_model", "auto_map": auto}))
    (tmp_path / "own_code.py").write_text(
        "from pathlib import Path\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        f"Path({str(tmp_path / 'ran')!r}).touch()\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own_model'\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    return tmp_path


def test_code_runs_only_if_it_is_trusted(custom: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("somebody was asked at the terminal"))
    expected = (
        "a checkpoint with Python code of its own; expected trust_remote_code=True, which runs that code; read it"
    )
    found: list[BaseException] = []

    def attempt() -> None:
        try:
            load(custom)
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=attempt, daemon=True)  # servers load in threads
    thread.start()
    thread.join(60)
    assert found and isinstance(found[0], ValueError) and expected in str(found[0])
    for call in (lambda: load_model(custom), lambda: load(models.own("llama"), custom, max_length=64)):
        with pytest.raises(ValueError, match=expected):
            call()
    assert not (custom / "ran").exists()
    engine = load(custom, trust_remote_code=True, max_length=64)
    want = load(folder, max_length=64).generate(["the thing"], GREEDY)[0].tokens
    assert engine.generate(["the thing"], GREEDY)[0].tokens == want and (custom / "ran").exists()
    assert type(engine.target.model).__name__ == "OwnForCausalLM"


def test_code_of_a_tokenizer_runs_only_if_it_is_trusted(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    own = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own_words.OwnTokenizer", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | own))
    (tmp_path / "own_words.py").write_text(
        "from transformers import PreTrainedTokenizerFast\nclass OwnTokenizer(PreTrainedTokenizerFast):\n    pass\n"
    )
    with pytest.raises(
        ValueError, match=r"tokenizer: got '.*cannot be read .*; pass trust_remote_code=True, which runs"
    ):
        load_tokenizer(tmp_path)
    found = load_tokenizer(tmp_path, ModelOptions(trust_remote_code=True))
    assert type(found).__name__ == "OwnTokenizer" and found.encode("the") == TOKENIZER.encode("the")


def test_a_dtype_is_not_the_checkpoints(folder: Path) -> None:
    assert load_model(folder, "bfloat16", options=ModelOptions(revision="main")).dtype == torch.bfloat16


def test_a_revision_of_a_folder_has_no_effect_and_is_said_to(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    load_model(folder, options=ModelOptions(revision="v2"))
    assert "revision 'v2' has no effect: model '" in caplog.text


def test_an_argument_that_from_pretrained_does_not_take_is_named(folder: Path) -> None:
    with pytest.raises(
        ValueError, match=r"^model_options: .* unexpected keyword argument 'foo'; expected arguments of"
    ):
        load(folder, model_options={"foo": 1})


def test_a_dtype_of_integers_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"^dtype: got torch.int8; expected one of float32, "):
        load(folder, dtype=torch.int8)


@pytest.mark.parametrize(
    ("given", "device", "name"),
    [
        ({"weights": "int8"}, "cpu", "weights 'int8'"),
        ({"device_map": "auto"}, "cpu", "device_map 'auto'"),
        ({"adapter": "some/adapter"}, "cpu", "adapter 'some/adapter'"),
        ({}, "cuda", "device 'cuda'"),
    ],
)
def test_weights_that_processes_share_go_with_nothing_that_places_or_changes_them(
    given: dict[str, Any], device: str, name: str
) -> None:
    options = ModelOptions(**given, more={"tp_plan": "auto"})
    assert options.is_placed
    with pytest.raises(ValueError, match=f"model_options: got weights that are sharded over processes, and {name}"):
        options.check(device)
