"""Quantized models: the text of transformers' generate with the same weights, whatever drafts; others are refused."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from oracles import models

from specdec_fast import SamplingParams, load
from specdec_fast.targets.tiny_models import tiny_model

COUNT = 20
PARAMS = SamplingParams(temperature=0, max_new_tokens=COUNT)


def wide(**overrides: Any) -> Any:
    """A model with inputs as wide as groups of int4 weights."""
    return tiny_model("llama", hidden_size=128, intermediate_size=256, head_dim=32, **overrides)


def text_of(model: Any) -> list[int]:
    """The greedy text of transformers' own generate."""
    ids = torch.tensor([models.prompt(17)])
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": COUNT, "pad_token_id": 0, "eos_token_id": None}
    return model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)[0, ids.shape[1] :].tolist()


def torchao_config(kind: str) -> Any:
    quantization = pytest.importorskip("torchao.quantization")
    return {
        "int8 weights": lambda: quantization.Int8WeightOnlyConfig(),
        "int4 weights": lambda: quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4),
        "int8": lambda: quantization.Int8DynamicActivationInt8WeightConfig(),
        "float8 weights": lambda: quantization.Float8WeightOnlyConfig(),
    }[kind]()


def quantized(kind: str) -> Any:
    """A model whose linear layers torchao has quantized."""
    config, model = torchao_config(kind), wide()
    from torchao.quantization import quantize_

    quantize_(model, config)
    return model


WAYS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "ngram": lambda: {"drafter": "ngram"},
    "layer_skip": lambda: {"drafter": "layer_skip"},
    "draft_model": lambda: {"draft": models.kin("llama")},
}


def texts_of(model: Any, count: int = 1, **options: Any) -> list[list[int]]:
    """Texts of an engine, the first for the prompt of `text_of`."""
    with load(model, max_length=64, eos_token_ids=(), **options) as engine:
        handles = engine.generate([models.prompt(seed) for seed in (17, 3, 4)[:count]], PARAMS)
        assert all(handle.error is None for handle in handles)
        assert type(model.model.layers[0].mlp.up_proj) is torch.nn.Linear, "quantized layers are left alone"
    return [handle.tokens for handle in handles]


@pytest.mark.parametrize("kind", ["int8 weights", "int4 weights", "float8 weights"])
def test_models_of_torchao(kind: str) -> None:
    model = quantized(kind)
    want, weight = text_of(model), model.model.layers[0].mlp.up_proj.weight
    assert type(weight.data) is not torch.Tensor and want != text_of(wide())
    for name, options in WAYS.items():
        assert texts_of(model, **options()) == [want], name
    assert texts_of(model, 3)[0] == want
    with load(model, max_length=64, eos_token_ids=()) as engine:
        stored = {"int8 weights": "int8", "int4 weights": "int4", "float8 weights": "float8_e4m3fn"}[kind]
        assert f"\npasses {stored} weights, float32 computation on cpu, " in engine.explain()
    assert model.model.layers[0].mlp.up_proj.weight is weight and text_of(model) == want


def test_activations_with_a_scale_per_token() -> None:
    """Their rounding magnifies that of attention, so texts are compared with plain decoding."""
    model = quantized("int8")
    (want,) = texts_of(model)
    assert want[:4] == text_of(model)[:4]
    for name, options in WAYS.items():
        assert texts_of(model, **options()) == [want], name
    assert texts_of(model, 3)[0] == want


def test_a_quantized_draft() -> None:
    draft = quantized("int8 weights")
    handle = load(models.own("llama"), draft, max_length=64, eos_token_ids=()).generate([models.prompt(17)], PARAMS)[0]
    assert handle.tokens == models.greedy_text("llama", 17, COUNT) and handle.stats.num_draft_tokens > 0


def test_weights_are_quantized_as_they_load(tmp_path: Path) -> None:
    from transformers import TorchAoConfig

    wide().save_pretrained(tmp_path)
    config = TorchAoConfig(torchao_config("int8 weights"))
    engine = load(tmp_path, model_options={"quantization_config": config}, max_length=64, eos_token_ids=())
    assert type(engine.target.model.model.layers[0].mlp.up_proj.weight.data) is not torch.Tensor
    tokens = engine.generate([models.prompt(17)], PARAMS)[0].tokens
    engine.close()
    assert tokens == text_of(engine.target.model)


SHARED = "model: LlamaForCausalLM: model.layers.0.self_attn.q_proj quantizes the activations of all tokens with one sc"


def test_activations_that_share_a_scale_are_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.ao.quantization.quantize_dynamic(wide(), {torch.nn.Linear}, dtype=torch.qint8)
        want = text_of(model)
        with pytest.raises(ValueError, match=f"^{SHARED}"):
            load(model, max_length=64)
        assert text_of(model) == want


def test_torchao_may_share_a_scale_too() -> None:
    config = pytest.importorskip("torchao.quantization").Int8DynamicActivationInt8WeightConfig
    from torchao.quantization import PerTensor, quantize_

    model = wide()
    quantize_(model, config(granularity=PerTensor()))
    with pytest.raises(ValueError, match=f"^{SHARED}"):
        load(model, max_length=64)


class Linear8bitLt(torch.nn.Linear):
    """The parts of bitsandbytes' layer that say how it selects columns."""

    def __init__(self, threshold: float) -> None:
        super().__init__(128, 128, bias=False)
        self.state = SimpleNamespace(threshold=threshold)


def test_columns_that_are_selected_over_all_tokens_are_refused() -> None:
    model = wide()
    layer = model.model.layers[0].self_attn
    layer.o_proj = Linear8bitLt(6.0)
    with pytest.raises(ValueError, match=r"o_proj selects columns .*threshold 6\).*llm_int8_threshold=0\.0"):
        load(model, max_length=64)
    layer.o_proj.state.threshold = 0.0
    assert load(model, max_length=64).generate([[1, 2]])[0].error is None


@pytest.mark.parametrize(
    ("config", "package"),
    [
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32}, "optimum"),
        ({"quant_method": "awq", "bits": 4, "group_size": 32}, "gptqmodel"),
        ({"quant_method": "compressed-tensors", "format": "int-quantized"}, "compressed-tensors"),
    ],
)
def test_what_transformers_needs_for_a_checkpoint_is_named(
    config: dict[str, Any], package: str, tmp_path: Path, is_installed: Callable[[str], bool]
) -> None:
    if is_installed(package.replace("-", "_")):
        pytest.skip(f"{package} is installed")
    wide().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    expected = "expected a quantization that transformers can run here; install what it names, or choose the checkpoint"
    with pytest.raises(
        ValueError, match=rf"^model: got '.*', whose weights are quantized by .*{package}.*; {expected}"
    ):
        load(tmp_path)


@pytest.fixture
def is_installed() -> Callable[[str], bool]:
    from importlib.util import find_spec

    return lambda name: find_spec(name) is not None
