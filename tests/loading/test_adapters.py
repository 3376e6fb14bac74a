"""PEFT adapters: merged where models are loaded by name, served in objects, and refused where they do not fit."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import models
from oracles.toy_tokenizer import byte_tokenizer
from typer.testing import CliRunner

from specdec_fast import SamplingParams, load
from specdec_fast.cli import main
from specdec_fast.loading import load_model
from specdec_fast.loading.adapters import _may_be_same
from specdec_fast.loading.model_options import ModelOptions
from specdec_fast.targets.tiny_models import tiny_model

peft = pytest.importorskip("peft")
TOKENIZER = byte_tokenizer()
VOCAB = len(TOKENIZER)
GREEDY = SamplingParams(temperature=0, max_new_tokens=12)
PROMPT = TOKENIZER.encode("the thing")
RANDOM = {"r": 4, "init_lora_weights": False}
LAYERS = {
    "lora": peft.LoraConfig(target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", **RANDOM),
    "dora": peft.LoraConfig(target_modules=["v_proj"], use_dora=True, **RANDOM),
    "ia3": peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "head": peft.LoraConfig(target_modules=["o_proj"], modules_to_save=["lm_head"], **RANDOM),
}


def base(**overrides: Any) -> Any:
    return tiny_model("llama", vocab_size=VOCAB, eos_token_id=VOCAB - 1, **overrides)


def adapted(kind: str = "lora") -> Any:
    """A PeftModel whose adapter changes the text."""
    torch.manual_seed(1)
    model = peft.get_peft_model(base(), LAYERS[kind])
    for name, weight in model.named_parameters():
        if "modules_to_save" in name or "ia3" in name or "lora_B" in name:
            torch.nn.init.normal_(weight, mean=1.0 if "ia3" in name else 0.0, std=0.3)
    return model.eval()


def text_of(model: Any) -> list[int]:
    """The greedy text of transformers' own generate."""
    ids = torch.tensor([PROMPT])
    options = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}
    return model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)[0, ids.shape[1] :].tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base model with its tokenizer."""
    place = tmp_path_factory.mktemp("base")
    base().save_pretrained(place)
    TOKENIZER.save_pretrained(place)
    return place


def saved(kind: str, place: Path, **config: Any) -> Path:
    """The folder of an adapter."""
    adapted(kind).save_pretrained(place)
    path = place / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return place


@pytest.mark.parametrize("modules", [["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]], ids=str)
@pytest.mark.parametrize("keeps_tied", [False, True])
def test_adapters_of_one_of_two_tied_tables_are_merged_into_it_alone(
    modules: list[str], keeps_tied: bool, tmp_path: Path
) -> None:
    tied = base(tie_word_embeddings=True)
    tied.save_pretrained(tmp_path / "base")
    torch.manual_seed(1)
    config = peft.LoraConfig(target_modules=[*modules, "o_proj"], ensure_weight_tying=keeps_tied, **RANDOM)
    trained = peft.get_peft_model(tied, config).eval()
    trained.save_pretrained(tmp_path / "adapter")
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        want = trained(input_ids=ids).logits
        got = load_model(tmp_path / "base", options=ModelOptions(adapter=tmp_path / "adapter"))(input_ids=ids).logits
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_adapters_of_repeated_layers_are_merged_into_each_alone(tmp_path: Path) -> None:
    base().save_pretrained(tmp_path / "base")
    torch.manual_seed(1)
    config = peft.LoraConfig(target_modules=["o_proj"], layer_replication=[[0, 2], [0, 2]], **RANDOM)
    trained = peft.get_peft_model(base(), config).eval()
    trained.save_pretrained(tmp_path / "adapter")
    want = text_of(trained)
    for source, options in ((tmp_path / "base", {"adapter": tmp_path / "adapter"}), (trained, {})):
        with load(source, max_length=64, **options) as engine:
            assert engine.generate([PROMPT], GREEDY)[0].tokens == want and engine.target.num_layers == 4


@pytest.mark.parametrize("kind", LAYERS)
def test_an_adapter_is_merged(kind: str, folder: Path, tmp_path: Path) -> None:
    engine = load(folder, adapter=saved(kind, tmp_path), max_length=64)
    want = text_of(adapted(kind))
    assert engine.generate([PROMPT], GREEDY)[0].tokens == want != text_of(base())
    assert type(engine.target.model).__name__ == "LlamaForCausalLM" and engine.tokenizer is not None
    assert not any("lora" in name or "ia3" in name for name, _ in engine.target.model.named_modules())


def test_the_folder_of_an_adapter_loads_its_model(folder: Path, tmp_path: Path) -> None:
    place = saved("lora", tmp_path, base_model_name_or_path=str(folder))
    engine = load(place, max_length=64)
    assert engine.generate(["the thing"], GREEDY)[0].tokens == text_of(adapted())
    with pytest.raises(ValueError, match=r"model: got '.*', an adapter, and adapter='.*'; expected one"):
        load(place, adapter=place)
    nameless = saved("lora", tmp_path / "nameless", base_model_name_or_path=None)
    with pytest.raises(
        ValueError, match=r"an adapter that does not name its model; expected a model; pass the model, and"
    ):
        load(nameless)


def test_the_command_line_merges(folder: Path, tmp_path: Path) -> None:
    options = ["--model", str(folder), "--adapter", str(saved("lora", tmp_path)), "-T", "0", "--max-new-tokens", "12"]
    result = CliRunner().invoke(main, ["generate", "the thing", *options, "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["requests"][0]["tokens"] == text_of(adapted()) and report["adapter"] == str(tmp_path)


@pytest.mark.parametrize("drafter", [None, "ngram", "layer_skip"])
@pytest.mark.parametrize("kind", ["lora", "dora", "head"])
def test_a_peft_model_is_served_and_given_back(kind: str, drafter: str | None) -> None:
    model = adapted(kind)
    want, weights = text_of(model), {name: value.clone() for name, value in model.state_dict().items()}
    with load(model, drafter=drafter, max_length=64) as engine:
        assert engine.generate([PROMPT], GREEDY)[0].tokens == want
    assert text_of(model) == want != text_of(base())
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_a_peft_model_serves_two_engines() -> None:
    model = adapted()
    engines = [load(model, max_length=64) for _ in range(2)]
    assert [engine.generate([PROMPT], GREEDY)[0].tokens for engine in engines] == [text_of(adapted())] * 2


def test_adapters_are_switched_between_requests() -> None:
    model = adapted()
    engine = load(model, max_length=64)
    with model.disable_adapter():
        assert engine.generate([PROMPT], GREEDY)[0].tokens == text_of(base())
    assert engine.generate([PROMPT], GREEDY)[0].tokens == text_of(adapted())


def test_a_peft_model_may_draft() -> None:
    engine = load(base(), adapted(), num_draft_tokens=3, max_length=64)
    handle = engine.generate([PROMPT], GREEDY)[0]
    assert handle.tokens == text_of(base()) and handle.stats.num_draft_tokens > 0
    model = adapted()
    with pytest.raises(ValueError, match="draft: got the target itself"):
        load(model.get_base_model(), model, max_length=64)


# -- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"hidden_size": 32, "head_dim": 8}, "size mismatch"),
        ({"num_hidden_layers": 1}, "4 of its 8 weights have no place in the model"),
        ({"num_hidden_layers": 4}, "it lacks 8 weights"),
    ],
    ids=["narrower", "shallower", "deeper"],
)
def test_an_adapter_of_another_model_is_refused(other: dict[str, Any], words: str, tmp_path: Path) -> None:
    base(**other).save_pretrained(tmp_path / "other")
    with pytest.raises(
        ValueError, match=r"adapter: got '.*a'.*expected an adapter for this model \(.*other, Llama"
    ) as error:
        load(tmp_path / "other", adapter=saved("lora", tmp_path / "a", base_model_name_or_path="the/first"))
    assert words in str(error.value)


def test_no_warning_says_that_the_weights_of_a_refused_adapter_fit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base(hidden_size=32, head_dim=8).save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="expected an adapter for this model"):
        load(tmp_path / "other", adapter=saved("lora", tmp_path / "a", base_model_name_or_path="the/first"))
    assert "the weights fit either" not in caplog.text


def test_an_adapter_with_added_tokens_says_how_to_serve_it(folder: Path, tmp_path: Path) -> None:
    model = base()
    model.resize_token_embeddings(VOCAB + 2)
    saving = ["embed_tokens", "lm_head"]
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["o_proj"], modules_to_save=saving)).save_pretrained(
        tmp_path
    )
    words = rf"trained with {VOCAB + 2} rows of .* \(the model has {VOCAB}\); .*_embeddings\({VOCAB + 2}\), and pass"
    with pytest.raises(ValueError, match=rf"^adapter: got '.*', {words} PeftModel.from_pretrained"):
        load(folder, adapter=tmp_path)


def test_an_adapter_of_a_wider_model_is_not_taken_for_one_with_added_tokens(folder: Path, tmp_path: Path) -> None:
    config = peft.LoraConfig(target_modules=["embed_tokens"])
    peft.get_peft_model(base(hidden_size=128), config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"^adapter: got '.*'; expected an adapter for this model"):
        load(folder, adapter=tmp_path)


def test_an_adapter_is_not_merged_into_offloaded_layers(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    here = ("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head")
    places = {**dict.fromkeys(here, "cpu"), "model.layers.1": "disk"}
    options = {"device_map": places, "model_options": {"offload_folder": str(tmp_path / "disk")}}
    with pytest.raises(
        ValueError, match=r"^adapter: got '.*' for a model with offloaded layers, .*; change device_map"
    ):
        load(folder, adapter=saved("lora", tmp_path / "a"), **options)


def test_an_adapter_without_weights_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    (saved("lora", tmp_path) / "adapter_model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"^adapter: got '.*', a folder without weights; expected adapter_model"):
        load("demo-target", adapter=tmp_path)


def test_an_adapter_of_another_family_is_refused(tmp_path: Path) -> None:
    tiny_model("gpt2", vocab_size=VOCAB).save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match=r"adapter: got .*Target modules .* not found in the base model"):
        load(tmp_path / "other", adapter=saved("lora", tmp_path / "a"))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"task_type": "SEQ_CLS"}, "an adapter for the task SEQ_CLS; expected one for CAUSAL_LM; choose another"),
        ({"alora_invocation_tokens": [3]}, "a LORA adapter: its PeftModel computes more than its layers"),
    ],
)
def test_an_adapter_of_another_kind_is_refused(
    config: dict[str, Any], words: str, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=f"adapter: got '.*', {words}"):
        load(folder, adapter=saved("lora", tmp_path, **config))


@pytest.mark.parametrize(
    "config",
    [
        peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
        peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    ],
    ids=["prompt", "prefix"],
)
def test_prompts_that_are_learned_are_refused(config: Any, folder: Path, tmp_path: Path) -> None:
    model = peft.get_peft_model(base(), config)
    model.save_pretrained(tmp_path)
    words = (
        "TUNING adapter: its PeftModel computes more than its layers .*; expected an adapter of layers, such as LoRA"
    )
    with pytest.raises(ValueError, match=f"adapter: got '.*', a P.*{words}"):
        load(folder, adapter=tmp_path)
    with pytest.raises(ValueError, match=f"model: got a PeftModelForCausalLM, a P.*{words}"):
        load(model)


def test_a_peft_model_that_does_more_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted().train()
    own = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        found = own(*args, **kwargs)
        found.logits = found.logits * 2
        return found

    monkeypatch.setattr(model, "forward", forward)
    with pytest.raises(ValueError, match="model: got a PeftModelForCausalLM: its PeftModel computes more than its lay"):
        load(model)
    assert model.training


@pytest.mark.parametrize("broken", ["missing", "weights", "config"])
def test_an_adapter_that_cannot_be_read_is_refused(broken: str, folder: Path, tmp_path: Path) -> None:
    place = tmp_path / "adapter"
    if broken != "missing":
        saved("lora", place)
        (place / ("adapter_model.safetensors" if broken == "weights" else "adapter_config.json")).write_bytes(b"no")
    with pytest.raises(ValueError, match=r"adapter: got '.*adapter'"):
        load(folder, adapter=place)


def test_objects_take_no_adapter(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"adapter: got a loaded model, which stays as it is; .*PeftModel.from_pretrained"
    ):
        load(models.own("llama"), adapter=saved("lora", tmp_path))


def test_the_package_is_named(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = saved("lora", tmp_path)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(
        ValueError, match=r"adapter: peft is not installed; expected the extra 'adapter'; .*\[adapter\]"
    ):
        load(folder, adapter=place)


@pytest.mark.parametrize(
    ("trained_for", "warned"),
    [
        ("owner/other-model", True),
        ("/a/folder/Other", True),
        ("owner/Base", False),
        ("/a/folder/base/", False),
        (r"C:\models\base", False),
        ("/hub/models--owner--Base/snapshots/0a1b", False),
        ("/hub/models--owner--Other/snapshots/base", True),
        (None, False),
    ],
)
def test_an_adapter_for_another_model_is_merged_with_a_warning(
    trained_for: str | None, warned: bool, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = saved("lora", tmp_path / "adapter", base_model_name_or_path=trained_for)
    shutil.copytree(folder, tmp_path / "Base")
    engine = load(tmp_path / "Base", adapter=place, max_length=64)
    assert engine.generate([PROMPT], GREEDY)[0].tokens == text_of(adapted())
    messages = [each for each in caplog.messages if "was trained for" in each]
    assert len(messages) == warned
    if warned:
        assert repr(trained_for) in messages[0] and repr(str(tmp_path / "Base")) in messages[0]


def test_a_base_by_another_path_is_the_same(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "link").symlink_to(folder)
    place = saved("lora", tmp_path / "adapter", base_model_name_or_path=str(tmp_path / "link"))
    load(folder, adapter=place, max_length=64)
    assert "was trained for" not in caplog.text


def test_an_adapter_for_another_class_is_merged_with_a_warning(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mapping = {"base_model_class": "Qwen2ForCausalLM", "parent_library": "transformers.models.qwen2.modeling_qwen2"}
    place = saved("lora", tmp_path, base_model_name_or_path=None, auto_mapping=mapping)
    load(folder, adapter=place, max_length=64)
    assert "was trained for a Qwen2ForCausalLM and is merged into a LlamaForCausalLM" in caplog.text


def test_names_of_gguf_files_say_more_than_the_model() -> None:
    assert _may_be_same("owner/Base-1B", "folder/base-1b.Q4_K_M.gguf")
    assert _may_be_same("owner/Base-1B", "owner/Base-1B-GGUF:base-1b-q8.gguf")
    assert not _may_be_same("owner/Base-1B", "folder/other-1b.Q4_K_M.gguf")
