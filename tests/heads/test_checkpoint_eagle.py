"""EAGLE checkpoints: every public layout, written as its producer writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import heads, models

from specdec_fast import Engine, SamplingParams
from specdec_fast.drafters import make_drafter
from specdec_fast.heads.checkpoint_eagle import load_eagle, load_eagle3, save_eagle, save_eagle3

PLAIN = {key: value for key, value in heads.LAYER.items() if key not in ("head_dim", "num_hidden_layers")}
REDUCED = {**heads.LAYER, "draft_vocab_size": len(heads.KEPT)}
IDS = [1, 0, 1]
METHOD = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}


@pytest.fixture(scope="module")
def target() -> Any:
    return models.target("llama", max_rows=2)


def speculators(**changes: Any) -> dict[str, Any]:
    """A config.json of `speculators`."""
    method = {**METHOD, **changes.pop("method", {})}
    return {
        "speculators_model_type": "eagle3",
        "speculators_version": "0.5.0",
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": len(heads.KEPT),
        "eagle_aux_hidden_state_layer_ids": IDS,
        "norm_before_residual": True,
        "target_hidden_size": None,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": "some/model", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": dict(heads.LAYER),
        **changes,
    }


def test_eagle_1_with_and_without_bias(tmp_path: Path, target: Any) -> None:
    """Without `bias`, fc has one. config.json has no head_dim, and equals the target's but for one layer."""
    for bias in (True, False):
        tensors = heads.eagle_tensors(bias=bias)
        config = {**PLAIN, "num_hidden_layers": 1, "architectures": ["LlamaForCausalLM"], "torch_dtype": "float16"}
        config |= {} if bias else {"bias": False}
        folder = heads.write(tmp_path / f"{bias}", config, tensors, "pytorch_model.bin")
        head = load_eagle(folder, target)
        assert torch.equal(head.fc.weight, tensors["fc.weight"]) and (head.fc.bias is not None) == bias
        layer: Any = head.layers[0]
        assert torch.equal(layer.self_attn.q_proj.weight, tensors["layers.0.self_attn.q_proj.weight"])
        assert isinstance(layer.input_layernorm, torch.nn.Identity) and head.aux_hidden_states == ("final_norm",)


def test_eagle_1_as_sglang_names_it(tmp_path: Path, target: Any) -> None:
    """The architecture's name differs; fields and keys are the authors'."""
    config = {**PLAIN, "num_hidden_layers": 1, "architectures": ["LlamaForCausalLMEagle"], "bias": False}
    tensors = heads.eagle_tensors(bias=False)
    head = load_eagle(heads.write(tmp_path, config, tensors), target)
    assert head.fc.bias is None and torch.equal(head.fc.weight, tensors["fc.weight"])


def test_older_names_of_norms(tmp_path: Path, target: Any) -> None:
    """Heads with norms before `speculators` converts them: old names map to new ones."""
    names = {
        "embed_layernorm": "embedding_layernorm",
        "hidden_layernorm": "layers.0.input_layernorm",
        "lm_head_layernorm": "pre_lm_head_layernorm",
    }
    norms = {name: torch.rand(64) + 0.5 for name in names}
    tensors = heads.eagle_tensors() | {f"{name}.weight": value for name, value in norms.items()}
    head = load_eagle(heads.write(tmp_path, {**PLAIN, "num_hidden_layers": 1}, tensors), target)
    for name, ours in names.items():
        assert torch.equal(head.state_dict()[f"{ours}.weight"], norms[name]), name


def test_offsets_with_vllm_s_names(tmp_path: Path, target: Any) -> None:
    tensors = heads.eagle3_tensors()
    tensors["draft_id_to_target_id"] = tensors.pop("d2t")
    head = load_eagle3(heads.write(tmp_path, REDUCED, tensors), target, layers=IDS)
    assert head.token_ids is not None and head.token_ids.tolist() == heads.KEPT


def test_eagle_1_of_a_qwen_target_has_biases_in_its_attention(tmp_path: Path, target: Any) -> None:
    tensors = heads.eagle_tensors()
    for name, width in (("q", 64), ("k", 32), ("v", 32)):
        tensors[f"layers.0.self_attn.{name}_proj.bias"] = torch.randn(width)
    head = load_eagle(heads.write(tmp_path, {**PLAIN, "num_hidden_layers": 1, "qkv_bias": True}, tensors), target)
    layer: Any = head.layers[0]
    assert torch.equal(layer.self_attn.v_proj.bias, tensors["layers.0.self_attn.v_proj.bias"])


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_eagle_3_as_published(tmp_path: Path, target: Any, name: str) -> None:
    """The head has its own rotary embedding: without rope_theta it is 10,000, for any target."""
    tensors = heads.eagle3_tensors()
    head = load_eagle3(heads.write(tmp_path, REDUCED, tensors, name), target, layers=IDS)
    assert head.token_ids is not None and head.token_ids.tolist() == heads.KEPT
    there = torch.zeros(96, dtype=torch.bool)
    there[torch.arange(len(heads.KEPT)) + tensors["d2t"]] = True
    assert torch.equal(there, tensors["t2d"])
    layer: Any = head.layers[0]
    assert torch.equal(layer.self_attn.k_proj.weight, tensors["midlayer.self_attn.k_proj.weight"])
    assert torch.equal(layer.hidden_norm.weight, tensors["midlayer.hidden_norm.weight"])
    assert head.config.rope_parameters["rope_theta"] == 10000.0 and not head.norm_before_residual
    assert head.embed_tokens is None and head.input_norm is None and head.fc_norm is None


def test_eagle_3_with_the_whole_vocabulary_has_no_offsets(tmp_path: Path, target: Any) -> None:
    tensors = heads.eagle3_tensors()
    tensors["lm_head.weight"] = torch.randn(96, 64)
    del tensors["d2t"], tensors["t2d"]
    head = load_eagle3(heads.write(tmp_path, dict(heads.LAYER), tensors), target, layers=IDS)
    assert head.token_ids is None and head.lm_head.out_features == 96


@pytest.mark.parametrize("prefix", ["midlayer.", "layers.0."])
def test_sglang_numbers_outputs_of_layers(tmp_path: Path, target: Any, prefix: str) -> None:
    config = {
        **REDUCED,
        "architectures": ["LlamaForCausalLMEagle3"],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, -1, 0], "use_aux_hidden_state": True},
    }
    tensors = {key: value.bfloat16() if value.is_floating_point() else value
               for key, value in heads.eagle3_tensors(prefix=prefix).items()}  # fmt: skip
    head = load_eagle3(heads.write(tmp_path, config, tensors), target)
    assert head.aux_hidden_states == ("entering:1", "entering:0", "entering:1")


def test_layer_numbers_by_convention(tmp_path: Path) -> None:
    """Published ids are inputs of layers, SGLang's are outputs. Both name the same states of twelve layers."""
    target: Any = type("Target", (), {"num_layers": 12, "hidden_size": 64, "num_embeddings": 96, "vocab_size": 96})()
    tensors = heads.eagle3_tensors()
    for at, extra in enumerate(
        (
            {},
            {"eagle_aux_hidden_state_layer_ids": [2, 6, 9]},
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 5, 8]}},
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 6, 9]}},
            {"eagle_aux_hidden_state_layer_ids": None},
        )
    ):
        head = load_eagle3(heads.write(tmp_path / str(at), {**REDUCED, **extra}, tensors), target)
        assert head.aux_hidden_states == ("entering:2", "entering:6", "entering:9")


def test_speculators_with_its_norms_and_its_embedding(tmp_path: Path, target: Any) -> None:
    tensors = heads.eagle3_tensors(prefix="layers.0.") | {
        "embed_tokens.weight": torch.randn(96, 64),
        "input_norm.weight": torch.rand(192) + 0.5,
    }
    config = speculators(norm_before_fc=True, norm_output=True)
    head = load_eagle3(heads.write(tmp_path / "one", config, tensors), target)
    assert (
        head.aux_hidden_states == ("entering:1", "entering:0", "entering:1")
        and head.norm_before_residual
        and head.norm_output
    )
    assert head.input_norm is not None and torch.equal(head.input_norm.weight, tensors["input_norm.weight"])
    assert head.embed_tokens is not None and torch.equal(head.embed_tokens.weight, tensors["embed_tokens.weight"])
    del tensors["input_norm.weight"]
    tensors |= {f"fc_norm.{index}.weight": torch.rand(64) for index in range(3)}
    head = load_eagle3(heads.write(tmp_path / "each", speculators(fc_norm=True), tensors), target)
    assert head.fc_norm is not None and torch.equal(head.fc_norm[2].weight, tensors["fc_norm.2.weight"])


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_speculators_of_eagle_1(tmp_path: Path, target: Any, norms: bool, bias: bool) -> None:
    """Without `fusion_bias` there is no bias. Without `layernorms`, norms exist if the file has some.

    The file contains a copy of the projection.
    """
    tensors = heads.eagle_tensors(bias=bias)
    del tensors["embed_tokens.weight"]
    renamed = {key.replace("fc.", "fusion_fc.", 1).replace("layers.0.", "transformer.", 1): value
               for key, value in tensors.items()} | {"lm_head.weight": torch.randn(96, 64)}  # fmt: skip
    if norms:
        names = ("embedding_layernorm", "transformer.input_layernorm", "pre_lm_head_layernorm")
        renamed |= {f"{name}.weight": torch.rand(64) for name in names}
    config = {**speculators(), "speculators_model_type": "eagle", "architectures": ["EagleSpeculator"]}
    config |= {"transformer_layer_architecture": "LlamaDecoderLayer"}
    bare = heads.write(tmp_path / "bare", config, renamed)
    if bias:
        with pytest.raises(ValueError, match=r"nothing reads: fc\.bias"):
            load_eagle(bare, target)
    else:
        head = load_eagle(bare, target)
        assert head.fc.bias is None and (head.embedding_layernorm is not None) == norms
    config |= {"fusion_bias": bias, "layernorms": norms}
    head = load_eagle(heads.write(tmp_path / "new", config, renamed), target)
    assert (head.fc.bias is not None) == bias and torch.equal(head.fc.weight, tensors["fc.weight"])
    layer: Any = head.layers[0]
    assert torch.equal(layer.self_attn.q_proj.weight, tensors["layers.0.self_attn.q_proj.weight"])
    assert isinstance(layer.input_layernorm, torch.nn.Identity) != norms
    if norms:
        assert head.embedding_layernorm is not None and head.pre_lm_head_layernorm is not None
        assert torch.equal(head.pre_lm_head_layernorm.weight, renamed["pre_lm_head_layernorm.weight"])
        del renamed["embedding_layernorm.weight"]
        with pytest.raises(ValueError, match=r"missing: embedding_layernorm\.weight"):
            load_eagle(heads.write(tmp_path / "less", config, renamed), target)
    config["speculators_config"]["proposal_methods"] = [{**METHOD, "accept_tolerance": 0.5}]
    with pytest.raises(ValueError, match=r"accept_tolerance=0\.5, which is lossy"):
        load_eagle(heads.write(tmp_path / "lossy", config, renamed), target)


def test_a_head_of_qwen_layers_and_of_two_of_them(tmp_path: Path, target: Any) -> None:
    """As `speculators` writes them: norms of queries and keys, biases, and a second layer of ordinary width."""
    tensors = heads.eagle3_tensors(prefix="layers.0.")
    second = heads.layer("layers.1.", 1, 5) | {"layers.1.input_layernorm.weight": torch.rand(64)}
    tensors |= second
    for at, name in ((0, "q"), (1, "q"), (0, "k"), (1, "k")):
        tensors[f"layers.{at}.self_attn.{name}_norm.weight"] = torch.rand(heads.DIM) + 0.5
    for at in range(2):
        for name, width in (("q", 64), ("k", 32), ("v", 32), ("o", 64)):
            tensors[f"layers.{at}.self_attn.{name}_proj.bias"] = torch.randn(width)
    layer = {**heads.LAYER, "model_type": "qwen3", "num_hidden_layers": 2, "attention_bias": True}
    head = load_eagle3(heads.write(tmp_path, speculators(transformer_layer_config=layer), tensors), target)
    wide, usual = (each.self_attn.q_proj.in_features for each in head.layers)  # type: ignore[union-attr]
    assert (wide, usual) == (128, 64)
    for key, value in tensors.items():
        if key.startswith("layers."):
            assert torch.equal(head.state_dict()[key], value), key


def test_a_head_that_is_narrower_than_its_target(tmp_path: Path) -> None:
    """`target_hidden_size` is the width that it reads; it then has its own embedding."""
    wide = models.target("gemma2", max_rows=1)
    assert wide.hidden_size == 64
    tensors = heads.eagle3_tensors(prefix="layers.0.") | {"fc.weight": torch.randn(64, 3 * 48)}
    config = speculators(target_hidden_size=48)
    with pytest.raises(ValueError, match="target_hidden_size is 48, the target's is 64"):
        load_eagle3(heads.write(tmp_path / "other", config, tensors), wide)
    narrow = dict.fromkeys(("hidden_size", "intermediate_size"), 32)
    made = {key: value[..., :32] if value.shape[-1] in (64, 128) and "fc" not in key else value
            for key, value in heads.eagle3_tensors(prefix="layers.0.").items()}  # fmt: skip
    made["fc.weight"] = torch.randn(32, 3 * 64)
    for name, rows, columns in (("q", 64, 64), ("k", 32, 64), ("v", 32, 64), ("o", 32, 64)):
        made[f"layers.0.self_attn.{name}_proj.weight"] = torch.randn(rows, columns)
    for name, rows, columns in (("gate", 32, 32), ("up", 32, 32), ("down", 32, 32)):
        made[f"layers.0.mlp.{name}_proj.weight"] = torch.randn(rows, columns)
    made |= {key: torch.rand(32) for key in made if key.endswith("norm.weight")}
    made |= {"t2d": heads.eagle3_tensors()["t2d"], "d2t": heads.eagle3_tensors()["d2t"]}
    made["lm_head.weight"] = torch.randn(len(heads.KEPT), 32)
    config = speculators(target_hidden_size=64, transformer_layer_config={**heads.LAYER, **narrow})
    with pytest.raises(ValueError, match="hidden_size is 32, the target's is 64"):
        load_eagle3(heads.write(tmp_path / "bare", config, made), wide)
    made["embed_tokens.weight"] = torch.randn(96, 32)
    folder = heads.write(tmp_path / "own", config, made)
    params = SamplingParams(temperature=0.9, seed=3, max_new_tokens=12)
    drafter: Any = make_drafter("eagle3", {"head": str(folder)}, target=wide)
    assert drafter.model.head.hidden_size == 32
    engine = Engine(wide, drafter)
    handle = engine.generate([models.prompt(9)], params)[0]
    assert handle.tokens == Engine(models.target("gemma2", max_rows=1)).generate([models.prompt(9)], params)[0].tokens
    assert handle.stats.num_draft_tokens > 0 and handle.stats.faults == 0


@pytest.mark.parametrize("suffix", ["bin", "safetensors"])
def test_eagle_in_shards(tmp_path: Path, target: Any, suffix: str) -> None:
    tensors, stem = heads.eagle3_tensors(), {"bin": "pytorch_model", "safetensors": "model"}[suffix]
    keys = sorted(tensors)
    parts = {f"{stem}-0000{at + 1}-of-00002.{suffix}": {key: tensors[key] for key in keys[at::2]} for at in range(2)}
    for name, part in parts.items():
        heads.write(tmp_path, REDUCED, part, name)
    listed = {key: name for name, part in parts.items() for key in part}
    (tmp_path / f"{stem}.{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": listed}))
    head = load_eagle3(tmp_path, target, layers=IDS)
    assert torch.equal(head.lm_head.weight, tensors["lm_head.weight"]) and head.token_ids is not None


def test_norms_are_where_the_configuration_says(tmp_path: Path, target: Any) -> None:
    """Against the written-out formulas, with attention to the own position only."""
    tensors = heads.eagle3_tensors(prefix="layers.0.")
    tensors["layers.0.self_attn.o_proj.weight"].zero_()
    features, embedded = torch.randn(5, 64), torch.randn(5, 64)

    def norm(x: torch.Tensor, key: str) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * tensors[f"{key}.weight"]

    for before in (False, True):
        for output in (False, True):
            config = speculators(norm_before_residual=before, norm_output=output)
            head = load_eagle3(heads.write(tmp_path / f"{before}{output}", config, tensors), target)
            head.config._attn_implementation = "eager"
            place = torch.arange(5)[None]
            with torch.no_grad():
                got = head(embedded[None], features[None], place)[0]
                hidden = norm(features, "layers.0.hidden_norm") if before else features
                inner = norm(hidden, "layers.0.post_attention_layernorm")
                gate = torch.nn.functional.silu(inner @ tensors["layers.0.mlp.gate_proj.weight"].T)
                up = inner @ tensors["layers.0.mlp.up_proj.weight"].T
                hidden = hidden + (gate * up) @ tensors["layers.0.mlp.down_proj.weight"].T
                normed = norm(hidden, "norm")
                assert torch.allclose(got, normed if output else hidden, atol=1e-4)
                assert torch.allclose(head.read(got, None), normed @ tensors["lm_head.weight"].T, atol=1e-4)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ({"verifier_accept_k": 2}, "verifier_accept_k=2, which is lossy"),
        ({"accept_tolerance": 0.1}, "accept_tol"),
    ],
)
def test_lossy_settings_are_refused(tmp_path: Path, target: Any, method: dict[str, Any], message: str) -> None:
    folder = heads.write(tmp_path, speculators(method=method), heads.eagle3_tensors(prefix="layers.0."))
    with pytest.raises(ValueError, match=message):
        load_eagle3(folder, target)


def test_a_written_checkpoint_is_read_back(tmp_path: Path, target: Any) -> None:
    folder = heads.write(tmp_path / "a", {**REDUCED, "eagle_aux_hidden_state_layer_ids": IDS}, heads.eagle3_tensors())
    head = load_eagle3(folder, target)
    save_eagle3(tmp_path / "b", head)
    again = load_eagle3(tmp_path / "b", target)
    assert head.aux_hidden_states == again.aux_hidden_states
    for key, value in head.state_dict().items():
        assert torch.equal(value, again.state_dict()[key]), key
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["draft_vocab_size"] == len(heads.KEPT)
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, -1, 0]
    first = load_eagle(heads.write(tmp_path / "c", {**PLAIN, "num_hidden_layers": 1}, heads.eagle_tensors()), target)
    save_eagle(tmp_path / "d", first)
    for key, value in load_eagle(tmp_path / "d", target).state_dict().items():
        assert torch.equal(value, first.state_dict()[key]), key
