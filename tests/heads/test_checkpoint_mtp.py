"""Modules of multi-token prediction: every public layout as its producer writes it, and faults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import heads, models
from safetensors.torch import load_file, save_file

from specdec_fast import HuggingFaceTarget
from specdec_fast.heads.checkpoint_mtp import FILE, LAYOUTS, load_mtp, save_mtp
from specdec_fast.heads.mtp import build_mtp_head
from specdec_fast.targets.tiny_models import tiny_model

CONFIG = {**heads.LAYER, "num_hidden_layers": 2, "num_nextn_predict_layers": 1, "architectures": ["LlamaForCausalLM"]}


@pytest.fixture(scope="module")
def target() -> Any:
    return models.target("llama", max_rows=1)


def backbone() -> dict[str, torch.Tensor]:
    """The target's own tensors, which are in the same file."""
    return {key: value.clone() for key, value in models.untouched("llama").state_dict().items()}


def holds(head: Any, tensors: dict[str, torch.Tensor], layout: str) -> None:
    own, inner, names = LAYOUTS[layout]
    number = 2 if layout == "deepseek" else 0
    for ours, theirs in names.items():
        if ours in ("embed_tokens", "lm_head"):
            continue
        assert torch.equal(getattr(head, ours).weight, tensors[f"{own.format(number)}{theirs}.weight"]), theirs
    assert torch.equal(head.layer.self_attn.k_proj.weight, tensors[f"{inner.format(number)}self_attn.k_proj.weight"])
    assert torch.equal(head.layer.input_layernorm.weight, tensors[f"{inner.format(number)}input_layernorm.weight"])


@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_a_module_inside_the_target_s_file(tmp_path: Path, target: Any, layout: str, name: str) -> None:
    tensors = heads.mtp_tensors(layout)
    head = load_mtp(heads.write(tmp_path, CONFIG, backbone() | tensors, name), target)
    holds(head, tensors, layout)
    assert head.hidden_first == (layout == "mimo"), "MiMo joins the hidden state first"


TABLES = {"deepseek": ("embed_tokens", "shared_head.head"), "qwen": ("embed_tokens", "lm_head")}


@pytest.mark.parametrize("layout", list(TABLES))
def test_its_embedding_and_projection_are_used_if_they_differ(tmp_path: Path, target: Any, layout: str) -> None:
    """DeepSeek-V3 and GLM-4.5 have such tables in their module, as copies or not."""
    outer = {"deepseek": "model.layers.2.", "qwen": "mtp."}[layout]
    names = [f"{outer}{name}.weight" for name in TABLES[layout]]
    text = models.untouched("llama")
    copies = [table.weight.detach().clone() for table in (text.get_input_embeddings(), text.get_output_embeddings())]
    tensors = heads.mtp_tensors(layout)
    shared = load_mtp(heads.write(tmp_path / "copies", CONFIG, tensors | dict(zip(names, copies))), target)
    holds(shared, tensors, layout)
    assert shared.embed_tokens is None and shared.lm_head is None
    own = [torch.randn(96, 64, generator=torch.Generator().manual_seed(at)) for at in range(2)]
    folder = heads.write(tmp_path / "own", CONFIG, tensors | dict(zip(names, own)))
    head = load_mtp(folder, target)
    assert head.embed_tokens is not None and head.lm_head is not None
    assert torch.equal(head.embed_tokens.weight, own[0]) and torch.equal(head.lm_head.weight, own[1])
    hidden = torch.randn(3, 64)
    assert torch.allclose(head.read(hidden, target.lm_head), hidden @ own[1].T, atol=1e-5)
    assert load_mtp(folder, target, own_tables=False).lm_head is None
    save_mtp(tmp_path / "again", head, 2, layout=layout)
    again = load_mtp(tmp_path / "again", target)
    assert again.lm_head is not None and torch.equal(again.lm_head.weight, own[1])
    tensors[names[1]] = torch.zeros(90, 64)
    with pytest.raises(
        ValueError, match=r"lm_head\.weight is \[90, 64\]; expected 64 columns and a row for each of the"
    ):
        load_mtp(heads.write(tmp_path / "less", CONFIG, tensors), target)


@pytest.mark.parametrize("suffix", ["bin", "safetensors"])
def test_only_shards_with_its_tensors_are_read(tmp_path: Path, target: Any, suffix: str) -> None:
    tensors, rest = heads.mtp_tensors(), backbone()
    stem = "pytorch_model" if suffix == "bin" else "model"
    keys = sorted(tensors)
    shards = {f"{stem}-0000{at + 1}-of-00003.{suffix}": {key: tensors[key] for key in keys[at::2]} for at in range(2)}
    weights = {key: shard for shard, own in shards.items() for key in own}
    weights |= dict.fromkeys(rest, f"{stem}-00003-of-00003.{suffix}")  # this file does not exist
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    for shard, own in shards.items():
        torch.save(own, tmp_path / shard) if suffix == "bin" else save_file(own, tmp_path / shard)
    (tmp_path / f"{stem}.{suffix}.index.json").write_text(json.dumps({"weight_map": weights}))
    holds(load_mtp(tmp_path, target), tensors, "deepseek")
    (tmp_path / sorted(shards)[0]).unlink()
    with pytest.raises(ValueError, match=r"index\.json: it names .*-00001-of-00003.*not in the folder"):
        load_mtp(tmp_path, target)


def test_the_first_of_several_modules_is_read(tmp_path: Path, target: Any) -> None:
    first, second = heads.mtp_tensors(), heads.mtp_tensors(num_layers=3, seed=7)
    folder = heads.write(tmp_path, {**CONFIG, "num_nextn_predict_layers": 2}, backbone() | first | second)
    holds(load_mtp(folder, target), first, "deepseek")


def test_separate_experts_become_one_tensor(tmp_path: Path) -> None:
    """GLM-4.5 writes gate, up and down of every expert separately."""
    large = HuggingFaceTarget(models.glm(), max_rows=1, max_length=64)
    made = build_mtp_head(large)
    torch.manual_seed(4)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    names = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "norm": "shared_head.norm"}
    tensors: dict[str, torch.Tensor] = {}
    for key, value in made.state_dict().items():
        part, _, rest = key.partition(".")
        if rest.endswith("experts.gate_up_proj"):
            for number, both in enumerate(value):
                gate, up = both.clone().chunk(2)
                tensors[f"model.layers.3.mlp.experts.{number}.gate_proj.weight"] = gate.clone()
                tensors[f"model.layers.3.mlp.experts.{number}.up_proj.weight"] = up.clone()
        elif rest.endswith("experts.down_proj"):
            for number, down in enumerate(value):
                tensors[f"model.layers.3.mlp.experts.{number}.down_proj.weight"] = down.clone()
        else:
            tensors["model.layers.3." + (rest if part == "layer" else f"{names[part]}.{rest}")] = value
    config = {**large.model.config.to_dict(), "num_nextn_predict_layers": 1}
    head = load_mtp(heads.write(tmp_path, config, tensors), large)
    for key, value in made.state_dict().items():
        assert torch.equal(head.state_dict()[key], value), key
    del tensors["model.layers.3.mlp.experts.2.up_proj.weight"]
    with pytest.raises(ValueError, match=r"missing: model\.layers\.3\.mlp\.experts\.2\.up_proj\.weight"):
        load_mtp(heads.write(tmp_path, config, tensors), large)


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_next_experts", "qwen3_5"])
def test_a_module_of_a_hybrid_is_read_with_the_target_s_configuration(tmp_path: Path, family: str) -> None:
    """Qwen3-Next writes each expert separately; Qwen3.5 keeps its fields under text_config."""
    large = HuggingFaceTarget(tiny_model(family), max_rows=1, max_length=64)
    made = build_mtp_head(large)
    torch.manual_seed(4)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    save_mtp(tmp_path / "written", made, large.num_layers, layout="qwen")
    tensors = {}
    for key, value in load_file(tmp_path / "written" / FILE).items():
        stem, _, rest = key.partition("mlp.experts.")
        if rest == "gate_up_proj":
            for number, both in enumerate(value):
                gate, up = both.clone().chunk(2)
                tensors[f"{stem}mlp.experts.{number}.gate_proj.weight"] = gate.clone()
                tensors[f"{stem}mlp.experts.{number}.up_proj.weight"] = up.clone()
        elif rest == "down_proj":
            tensors |= {f"{stem}mlp.experts.{at}.down_proj.weight": each.clone() for at, each in enumerate(value)}
        else:
            tensors[key] = value
    config = {**large.model.config.to_dict(), "mtp_num_hidden_layers": 1}
    folder = heads.write(tmp_path, {"text_config": config} if family == "qwen3_5" else config, tensors)
    head = load_mtp(folder, large)
    for key, value in made.state_dict().items():
        assert torch.equal(head.state_dict()[key], value), key


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_a_written_checkpoint_is_read_back(tmp_path: Path, target: Any, layout: str) -> None:
    head = build_mtp_head(target, hidden_first=layout == "mimo")
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    save_mtp(tmp_path, head, 2, layout=layout)
    again = load_mtp(tmp_path, target)
    for key, value in head.state_dict().items():
        assert torch.equal(value, again.state_dict()[key]), key
    assert again.hidden_first == head.hidden_first
    with pytest.raises(ValueError, match="layout: got 'odd'; expected one of deepseek, qwen, mimo"):
        save_mtp(tmp_path, head, 2, layout="odd")
    with pytest.raises(ValueError, match="for hidden_first="):
        save_mtp(tmp_path, head, 2, layout="qwen" if layout == "mimo" else "mimo")


BROKEN = [
    (lambda config, tensors: tensors.pop("model.layers.2.eh_proj.weight"), "missing: model.layers.2.eh_proj.weight"),
    (
        lambda config, tensors: tensors.pop("model.layers.2.mlp.up_proj.weight"),
        "missing: model.layers.2.mlp.up_proj.weight",
    ),
    (
        lambda config, tensors: tensors.update({"model.layers.2.mlp.odd": torch.ones(1)}),
        "nothing reads: model.layers.2.mlp.odd",
    ),
    (
        lambda config, tensors: tensors.update({"model.layers.2.hnorm.weight": torch.ones(3)}),
        r"model.layers.2.hnorm.weight is \[3\], expected \[64\]",
    ),
    (
        lambda config, tensors: tensors["model.layers.2.enorm.weight"].fill_(float("nan")),
        "model.layers.2.enorm.weight holds numbers",
    ),
    (lambda config, tensors: config.update(hidden_size=32), "hidden_size in config.json is 32, the target's is 64"),
    (lambda config, tensors: config.update(vocab_size=500), "vocab_size in config.json is 500, the target's is 96"),
    (lambda config, tensors: config.update(num_hidden_layers=61), "num_hidden_layers in config.json is 61, the target"),
    (
        lambda config, tensors: config.update(num_nextn_predict_layers=3),
        r"config.json: field 'num_nextn_predict_layers' is 3, the file has modules at 2; expected 3 from 2",
    ),
    (
        lambda config, tensors: config.update(num_nextn_predict_layers=0),
        "'num_nextn_predict_layers' is 0, the file has modules at 2",
    ),
    (
        lambda config, tensors: config.update(num_nextn_predict_layers="1"),
        "field 'num_nextn_predict_layers' is '1'; expected int",
    ),
    (lambda config, tensors: tensors.update({"mtp.fc.weight": torch.ones(1)}), "layouts deepseek, qwen; expected"),
    (
        lambda config, tensors: tensors.clear(),
        "no key of model.safetensors belongs to a module of multi-token prediction; expected a target .* as GLM-4.5",
    ),
]


@pytest.mark.parametrize(("change", "message"), BROKEN)
def test_errors_name_the_key_or_field(tmp_path: Path, target: Any, change: Any, message: str) -> None:
    config, tensors = dict(CONFIG), heads.mtp_tensors()
    change(config, tensors)
    with pytest.raises(ValueError, match=message):
        load_mtp(heads.write(tmp_path, config, backbone() | tensors), target)
