"""Checks of opened models: every architecture of transformers is served exactly, or refused in words."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from oracles import models
from oracles.tiny_architectures import WINDOW, model_types, tiny_architecture

from specdec_fast.core.draft import Draft
from specdec_fast.targets import attention
from specdec_fast.targets.huggingface import HuggingFaceTarget
from specdec_fast.targets.load_checks import SAMPLE_TOKENS
from specdec_fast.targets.model_support import UnsupportedModelError

# configurations that cannot be shrunk by field names alone, one that needs a package, and one of 190 M parameters
NOT_BUILT = {
    "blt", "cohere_compass_text", "dbrx", "dots1", "dots3_note", "gemma3n", "gemma3n_text",
    "gemma4_assistant", "gemma4_unified_assistant", "gpt_neo", "lfm2_moe", "mamba2", "musicgen", "musicgen_melody",
    "reformer", "zamba", "zamba2", "zaya",
}  # fmt: skip
# those of transformers 5.23 that are refused; others may come to work with a later release
REFUSED = {
    "axk2", "bart", "big_bird", "bigbird_pegasus", "biogpt", "blenderbot", "bloom", "blenderbot-small", "camembert",
    "codegen", "cpmant", "data2vec-text", "deepseek_v32", "deepseek_v4", "diffllama", "doge", "dots3_note_text",
    "falcon", "git", "glm_moe_dsa", "gpt_neox_japanese", "gptj", "hrm_text", "hy_v4", "inkling2_text", "inkling_text",
    "longcat_flash", "marian", "mbart", "megatron-bert", "minimax", "mpt", "mvp", "nemotron",
    "openai-gpt", "pegasus", "plbart", "prophetnet", "recurrent_gemma", "rembert", "roberta", "roberta-prelayernorm",
    "roformer", "rwkv", "stablelm", "trocr", "whisper", "xglm", "xlm", "xlm-roberta", "xlm-roberta-xl", "xlnet",
    "xlstm", "xmod",
}  # fmt: skip
TEXT = models.prompt(3 * WINDOW)


def own_logits(model: Any, text: list[int]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([text]), use_cache=False).logits[0].float()
    return found


def packed(target: HuggingFaceTarget, text: list[int], prompt: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Logits behind a prompt that was stored before, of a chain with a sibling at every token, and its final states."""
    assert target.cache.reserve(0, 2 * len(text))
    rows, bounds = torch.tensor([0], dtype=torch.int32), torch.tensor([0, prompt], dtype=torch.int32)
    target.extend(rows, torch.tensor(text[:prompt]), bounds, logits=False)
    nodes, parents = [text[prompt]], [-1]
    for token in text[prompt + 1 :]:
        parents += [len(nodes) - 1] * 2
        nodes += [(token + 7) % 96, token]
    draft = Draft.trees([0], [(nodes, parents)])
    names = () if target.why_no_lm_head else ("final_norm",)
    output = target.score(draft, draft.get_plan(), names)[0]
    assert output.logits is not None
    states = output.aux_hidden_states.get("final_norm")
    return output.logits[::2].float(), None if states is None else states[::2]


@pytest.mark.parametrize("model_type", [each for each in model_types() if each not in NOT_BUILT])
def test_an_architecture_is_served_exactly_beyond_its_windows_or_refused(model_type: str) -> None:
    model = tiny_architecture(model_type)
    try:
        want = own_logits(model, TEXT)
    except (RuntimeError, ValueError):  # this configuration does not run at all
        want = None
    before, own = copy.deepcopy(model.state_dict()), model.config._attn_implementation
    try:
        target = HuggingFaceTarget(model, max_rows=1, max_length=128)
    except UnsupportedModelError as error:
        assert type(model).__name__ in str(error) and "expected" in str(error)
        assert model_type in REFUSED, str(error)
        assert model.config._attn_implementation == own
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert want is None or torch.equal(own_logits(model, TEXT), want)
        return
    assert want is not None
    got, states = packed(target, TEXT, 20)
    torch.testing.assert_close(got, want[20:], rtol=1e-4, atol=1e-4 * float(want.std()))
    assert len(target.layers) == target.num_layers
    if states is not None:  # heads see the same logits
        torch.testing.assert_close(target.lm_head(states), got, rtol=1e-4, atol=1e-4 * float(want.std()))


def with_masks(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Any:
    """A Llama that makes its mask with further arguments of `create_causal_mask`, and passes no window."""
    from transformers.masking_utils import create_causal_mask as make
    from transformers.models.llama import modeling_llama

    monkeypatch.setattr(modeling_llama, "create_causal_mask", lambda **given: make(**given, **changes))
    return models.own("llama")


@pytest.mark.parametrize("window", [5, 24, 100, 400])
def test_a_window_that_only_the_mask_has_is_served(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check reads 4 tokens, whatever the window."""
    model = with_masks(monkeypatch, and_mask_function=lambda _, __, query, key: key > query - window)
    text = models.prompt(min(2 * window, 120))
    want = own_logits(model, text)
    target = HuggingFaceTarget(model, max_rows=1, max_length=512)
    assert target.windows == [window] * 2
    torch.testing.assert_close(packed(target, text, len(text) // 2)[0], want[len(text) // 2 :], rtol=1e-4, atol=1e-4)


def test_a_window_as_long_as_the_longest_text_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    model = with_masks(monkeypatch, and_mask_function=lambda _, __, query, key: key > query - 64)
    target = HuggingFaceTarget(model, max_rows=1, max_length=64)
    assert target.windows is None
    assert HuggingFaceTarget(models.own("mistral"), max_rows=1, max_length=24).windows is None


@pytest.mark.parametrize(
    "rule",
    [
        {
            "and_mask_function": lambda _, __, query, key: (query + 200) // 300 == (key + 200) // 300
        },  # chunks that start late
        {"and_mask_function": lambda _, __, query, key: (query // 300 == key // 300) | (key < 4)},  # sinks and chunks
        {"or_mask_function": lambda _, __, query, key: (query < 200) & (key < 200)},  # a bidirectional prefix
        {"and_mask_function": lambda _, __, query, key: (query - key) % 3 != 2},  # dilated
        {"and_mask_function": lambda _, __, query, key: (key > query - 50) | (key < 4)},  # sinks and a window
    ],
)
def test_other_masks_are_refused(rule: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = with_masks(monkeypatch, **rule)
    with pytest.raises(UnsupportedModelError, match="neither causal nor a sliding window nor chunks") as error:
        HuggingFaceTarget(model, max_rows=1, max_length=512)
    assert "texts up to 512 tokens" in str(error.value)


def test_a_mask_that_cannot_be_tested_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    table = torch.ones(200, dtype=torch.bool)  # longer texts have no mask
    model = with_masks(monkeypatch, and_mask_function=lambda _, __, query, key: table[key])
    with pytest.raises(UnsupportedModelError, match=r"mask cannot be tested \(\w*Error: .*index") as error:
        HuggingFaceTarget(model, max_rows=1, max_length=512)
    assert isinstance(error.value.__cause__, Exception)


def test_a_model_that_attends_to_later_tokens_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="neither causal nor a sliding window"):
        HuggingFaceTarget(tiny_architecture("bert", is_decoder=False), max_rows=1, max_length=64)


def change_argument(model: Any, change: Any) -> Any:
    """Changes what the attention module of layer 1 gets."""
    model.model.layers[1].self_attn.register_forward_pre_hook(
        lambda _module, args, kwargs: (args, change(kwargs)), with_kwargs=True
    )
    return model


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda given: {**given, "attention_mask": given["attention_mask"].clone()}, "layer 1 makes or changes its"),
        (lambda given: {**given, "position_bias": torch.zeros(1)}, "layer 1 passes position_bias to its attention"),
        (lambda given: {**given, "indices": [1]}, "layer 1 passes indices to its attention"),
        (lambda given: {**given, "is_causal": False}, "layer 1 passes is_causal=False"),
        (lambda given: {**given, "attention_mask": None, "sliding_window": 9}, "a window of 9 and no mask"),
    ],
)
def test_attention_that_gets_something_else_is_refused(change: Any, message: str) -> None:
    model = models.own("llama")
    model.set_attn_implementation("eager")
    with pytest.raises(UnsupportedModelError, match=message):
        HuggingFaceTarget(change_argument(model, change), max_rows=1, max_length=64)


def test_attention_of_a_layer_without_a_number_is_refused() -> None:
    model = models.own("llama")
    model.model.layers[1].self_attn.layer_idx = None
    with pytest.raises(
        UnsupportedModelError, match=r"attention calls from layers \[0, None\]; expected one from each of 2"
    ):
        HuggingFaceTarget(model, max_rows=1, max_length=64)


def test_arguments_without_meaning_are_allowed() -> None:
    change_argument(model := models.own("llama"), lambda given: {**given, "is_causal": True, "flag": False, "x": None})
    assert HuggingFaceTarget(model, max_rows=1, max_length=64).windows is None


@pytest.mark.parametrize(
    "mix",
    [
        lambda hidden, _: hidden + 0.5 * hidden.roll(1, 1),  # a token shift, as convolutions have
        lambda hidden, _: hidden + hidden.mean(1, keepdim=True),
        lambda hidden, _: hidden * torch.arange(1, hidden.shape[1] + 1)[:, None],  # the place in the pass
        lambda hidden, positions: hidden * (1 + positions.max() / 512),  # the longest row of a batch
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_that_mix_tokens_outside_of_attention_are_refused(mix: Any, dtype: torch.dtype) -> None:
    model = models.own("llama", dtype)
    model.model.layers[0].register_forward_pre_hook(
        lambda _module, args, kwargs: ((mix(args[0], kwargs["position_ids"]).to(dtype), *args[1:]), kwargs),
        with_kwargs=True,
    )
    with pytest.raises(UnsupportedModelError, match="depends on the other tokens of a pass or on their order"):
        HuggingFaceTarget(model, max_rows=1, max_length=512)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "wrong",
    [{"scale": 0.5}, {"softcap": 0.5}, {"window": 3}, {"sinks": torch.full((4,), 1.0)}],
    ids=lambda each: str(*each),
)
def test_attention_that_computes_something_else_is_refused(
    wrong: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = attention.tree_attention
    monkeypatch.setattr(attention, "tree_attention", lambda *given, **named: real(*given, **{**named, **wrong}))
    with pytest.raises(UnsupportedModelError, match="differ from the model's own by"):
        HuggingFaceTarget(models.own("llama", dtype), max_rows=1, max_length=64)


def test_one_wrong_token_is_seen_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window of all tokens but one of the sample changes its last token alone."""
    wrong = {"window": SAMPLE_TOKENS - 1}
    test_attention_that_computes_something_else_is_refused(wrong, torch.float32, monkeypatch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_leak_between_branches_is_refused(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check scores a branch among siblings; an attention that sees them would be noticed."""
    real = attention.tree_attention

    def leaking(*given: Any, **named: Any) -> torch.Tensor:
        tree = list(given)
        if tree[6] is not None:  # every node sees all nodes in front of it
            tree[6] = tree[6].clone().fill_(0)
            tree[6][:, 0] = (2 << torch.arange(len(tree[6]))) - 1
        return real(*tree, **named)

    monkeypatch.setattr(attention, "tree_attention", leaking)
    with pytest.raises(UnsupportedModelError, match="differ from the model's own by"):
        HuggingFaceTarget(models.own("llama", dtype), max_rows=1, max_length=64)


@pytest.mark.parametrize("max_length", [1, 2, 3, 13, 24])
def test_short_texts_are_checked_too(max_length: int) -> None:
    target = HuggingFaceTarget(models.own("mistral"), max_rows=1, max_length=max_length)
    assert target.cache.pages.num_used == 0 and target.why_no_lm_head is None


def test_errors_of_a_model_are_reported_as_its_own() -> None:
    model = models.own("llama")
    model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(UnsupportedModelError, match="its own forward pass raised ZeroDivisionError: division by zero"):
        HuggingFaceTarget(model, max_rows=1, max_length=64)
