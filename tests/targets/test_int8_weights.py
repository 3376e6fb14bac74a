"""Int8 weights: rounding of a whole model, decoding with it, and what is refused."""

from __future__ import annotations

import copy

import pytest
import torch

from specdec_fast import Engine, HuggingFaceTarget, SamplingParams, load
from specdec_fast.loading import load_model
from specdec_fast.targets.fused_forward import why_not_fused
from specdec_fast.targets.int8_weights import Int8Linear, quantize_linear_layers
from specdec_fast.targets.tiny_models import tiny_model

PROMPT = "The quick brown fox"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_model_computes_with_rounded_weights(dtype: torch.dtype) -> None:
    """Equal to the same model with dequantized weights, up to the rounding of the dtype."""
    model, rounded = load_model("demo-draft", dtype), load_model("demo-draft", dtype)
    embedding = model.model.embed_tokens.weight
    before = embedding.clone()
    size = quantize_linear_layers(model)
    kinds = [type(module) for module in model.modules()]
    assert size.layers == kinds.count(Int8Linear) > 1
    assert torch.nn.Linear not in kinds
    assert size.after < 0.6 * size.before if dtype == torch.bfloat16 else size.after < 0.3 * size.before
    assert torch.equal(embedding, before), "the tied embedding keeps its values"
    rounded.config.tie_word_embeddings = False
    for name, layer in list(rounded.named_modules()):
        if isinstance(layer, torch.nn.Linear):
            own = model.get_submodule(name)
            assert isinstance(own, Int8Linear)
            assert not torch.equal(own.weight, layer.weight)
            layer.weight = torch.nn.Parameter(own.weight)
    tokens = torch.arange(1, 40)[None]
    with torch.inference_mode():
        got, want = model(tokens).logits, rounded(tokens).logits
    tolerance = 1e-4 if dtype == torch.float32 else 0.25
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decoding_is_lossless_with_respect_to_the_quantized_model(dtype: str, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, max_new_tokens=40, seed=5)
    common = {"dtype": dtype, "weights": "int8", "max_length": 128, "rule": "replay"}
    plain = load("demo-target", drafter="none", **common).generate([PROMPT], params)[0]
    drafted = load("demo-target", "demo-draft", num_draft_tokens=4, **common).generate([PROMPT], params)[0]
    assert list(drafted.tokens) == list(plain.tokens)
    assert plain.tokens


def test_a_layer_in_two_places_stays_one() -> None:
    shared = torch.nn.Linear(8, 8)
    model = torch.nn.Sequential(shared, shared, torch.nn.Linear(8, 4))
    assert quantize_linear_layers(model).layers == 2
    assert model[0] is model[1]


def test_gradients_pass_to_the_inputs() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 4))
    quantize_linear_layers(model)
    x = torch.randn(3, 8, requires_grad=True)
    model(x).sum().backward()
    torch.testing.assert_close(x.grad, model[0].weight.sum(0).expand(3, 8))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weights": "int4"}, "weights: got 'int4'; expected 'int8'"),
        ({"weights": "int8", "dtype": "float64"}, "dtype float64"),
    ],
)
def test_what_is_refused_before_loading(change: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load("no such model", **change)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3"])
def test_fused_passes_read_int8_weights(family: str) -> None:
    model = tiny_model(family)
    quantize_linear_layers(model)
    prompt, params = [5, 6, 7] * 9, SamplingParams(temperature=0, max_new_tokens=20)
    texts, logits = [], []
    for fused in (True, False):
        target = HuggingFaceTarget(copy.deepcopy(model), max_length=64, fused_forward=fused)
        assert (target.why_not_fused is None) == fused
        texts.append(Engine(target).generate([prompt], params)[0].tokens)
        tokens, ends = torch.tensor(prompt), torch.tensor([0, len(prompt)], dtype=torch.int32)
        assert target.cache.reserve(0, 32)
        logits.append(target.extend(torch.tensor([0], dtype=torch.int32), tokens, ends, logits=True).logits)
    assert texts[0] == texts[1]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


def test_models_with_some_int8_layers_are_not_fused() -> None:
    model = tiny_model("llama")
    model.model.layers[0].mlp.up_proj = Int8Linear(model.model.layers[0].mlp.up_proj)
    assert why_not_fused(model) == "some linear layers have int8 weights and others do not; expected all or none"


def test_a_loaded_model_keeps_its_weights() -> None:
    model = load_model("demo-draft")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="and a loaded model, which stays as it is; expected the name of a model"):
        load(model, weights="int8")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert any(type(module) is torch.nn.Linear for module in model.modules())


def quantized_layer() -> torch.nn.Linear:
    """A layer whose weight is a tensor of another class, as torchao makes them."""

    class Packed(torch.Tensor):
        pass

    layer = torch.nn.Linear(4, 4)
    layer.weight = torch.nn.Parameter(layer.weight.detach().as_subclass(Packed), requires_grad=False)
    return layer


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (torch.nn.Sequential(torch.nn.ReLU()), "has no torch.nn.Linear"),
        (torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4, dtype=torch.float64)), "torch.float64"),
        (torch.nn.Sequential(torch.nn.Linear(4, 4, device="meta")), "on meta; expected the CPU"),
        (torch.nn.Sequential(quantized_layer()), "with quantized layers"),
    ],
)
def test_models_that_cannot_be_quantized_stay_as_they_are(model: torch.nn.Module, words: str) -> None:
    before = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=words):
        quantize_linear_layers(model)
    assert [type(module) for module in model.modules()] == before
