"""The fused forward: equality with the model's own modules, and the models that it serves."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import models

from specdec_fast import Engine, HuggingFaceTarget, SamplingParams, get_drafter, load
from specdec_fast.core.draft import Draft
from specdec_fast.loading import load_model
from specdec_fast.targets import fused_forward
from specdec_fast.targets.fused_forward import FusedForward
from specdec_fast.targets.skipped_layers import SkippedLayers
from specdec_fast.targets.tiny_models import tiny_model
from specdec_kernels import use_backend
from specdec_kernels.dispatch import extension
from specdec_kernels.ops.fused_forward.decoder_table import MATRICES

pytestmark = pytest.mark.skipif(extension.unavailable_reason() is not None, reason="CPU extension not built")
PROMPTS = [models.prompt(length) for length in (3, 40, 17)]


def greedy(target: HuggingFaceTarget, drafter: Any = None, new: int = 20) -> list[list[int]]:
    wanted = SamplingParams(temperature=0, max_new_tokens=new)
    return [handle.tokens for handle in Engine(target, drafter).generate(PROMPTS, wanted)]


def scored(target: HuggingFaceTarget, aux_hidden_states: tuple[str, ...] = ()) -> torch.Tensor:
    """Returns the logits of trees in two rows over an empty cache."""
    draft = Draft.trees([0, 1], [([5, 6, 7, 8], [-1, 0, 0, 1]), ([9], [-1])])
    for row in (0, 1):
        assert target.cache.reserve(row, 8)
    logits = target.score(draft, draft.get_plan(), aux_hidden_states)[0].logits
    target.cache.release([0, 1])
    assert logits is not None
    return logits


def shaken(model: Any) -> Any:
    """Returns a model whose norms and biases have other values than at the start of training."""
    source = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=source) * 0.3)
    return model


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4, "attention_bias": True}),
        ("llama", {"num_hidden_layers": 1, "intermediate_size": 50, "head_dim": 24, "rms_norm_eps": 0.1}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}}),
        ("llama", {
            "rope_parameters": {
                "rope_type": "yarn", "factor": 4.0, "rope_theta": 100.0, "original_max_position_embeddings": 128,
            }
        }),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
        ("qwen3", {}),
        ("mistral", {}),
        ("gemma2", {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 4.0}),
        ("gemma3", {}),
        ("gemma3", {"rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        }}),
    ],
)  # fmt: skip
def test_logits_are_those_of_the_modules(family: str, changes: dict[str, Any]) -> None:
    model = shaken(tiny_model(family, **changes))
    plain = HuggingFaceTarget(copy.deepcopy(model), max_length=64)
    whole = HuggingFaceTarget(model, max_length=64, fused_forward=True)
    assert isinstance(whole._logits, FusedForward)
    torch.testing.assert_close(scored(whole), scored(plain), rtol=1e-4, atol=1e-4)
    assert not torch.equal(scored(whole), scored(plain)), "another way to add: not the same bits throughout"
    assert greedy(whole) == greedy(plain)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3"])
def test_a_target_with_fused_forward_gives_the_text_of_generate(family: str) -> None:
    """Texts are longer than windows, and drafts are chains by one operator."""
    want = [models.greedy_text(family, len(prompt), 20) for prompt in PROMPTS]
    small = HuggingFaceTarget(models.kin(family), max_length=128, fused_forward=True)
    target = models.target(family, fused_forward=True)
    assert greedy(target) == want
    assert greedy(target, get_drafter("draft_model")(small, num_draft_tokens=4)) == want


@pytest.mark.parametrize(("name", "more"), [("eagle", {"depth": 0}), ("medusa", {})])
def test_a_bundled_head_drafts_over_fused_passes_with_the_bits_of_plain_decoding(name: str, more: Any) -> None:
    """Log-probabilities of chains are equal too: passes with hidden states and without add in the same order."""
    wanted = SamplingParams(temperature=0, max_new_tokens=24, logprobs=1)
    prompts, found, chain = ["def main(", "In the beginning"], [], {"shape": (-1, 0, 1, 2), **more}
    for drafter, options in (("none", None), (name, chain)):
        engine: Any = load("demo-target", drafter=drafter, drafter_options=options, max_length=96, max_rows=2)
        assert engine.target.why_not_fused is None
        found.append(engine.generate(prompts, wanted))
    for plain, drafted in zip(*found, strict=True):
        assert drafted.tokens == plain.tokens and drafted.logprobs == plain.logprobs
    assert engine.stats.tau > 1.2


def test_weights_are_shared_and_may_change_in_place() -> None:
    target = models.target("llama", fused_forward=True)
    model: Any = target.model
    want = {name: value.clone() for name, value in models.untouched("llama").state_dict().items()}
    assert all(torch.equal(value, want[name]) for name, value in model.state_dict().items())
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight.mul_(-1)
        model.model.layers[0].mlp.up_proj.weight.mul_(0.5)
    plain = HuggingFaceTarget(copy.deepcopy(model), max_length=64)
    torch.testing.assert_close(scored(target), scored(plain), rtol=1e-4, atol=1e-4)


def test_two_targets_over_a_model_read_the_same_weights() -> None:
    first = models.target("llama", fused_forward=True)
    second = HuggingFaceTarget(first.model, max_length=64, fused_forward=True)
    assert isinstance(first._logits, FusedForward) and isinstance(second._logits, FusedForward)
    assert torch.equal(scored(first), scored(second))
    for one, other in zip(first._logits.table.layers, second._logits.table.layers, strict=True):
        assert all(getattr(one, name) is getattr(other, name) for name in MATRICES)


def test_the_model_can_still_be_saved(tmp_path: Path) -> None:
    model = models.target("llama", fused_forward=True).model
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    want = models.untouched("llama").state_dict()
    assert all(torch.equal(value, want[name]) for name, value in again.state_dict().items())


def test_a_copy_is_independent() -> None:
    target = models.target("llama", fused_forward=True)
    want = scored(target)
    copied = copy.deepcopy(target)
    with torch.no_grad():
        for parameter in target.model.parameters():
            parameter.zero_()
    for cache in (*target.cache.keys, *target.cache.values):
        cache.fill_(torch.nan)
    assert torch.equal(scored(copied), want)
    with torch.no_grad():
        copied.model.get_output_embeddings().weight.mul_(2)
    assert torch.equal(scored(copied), 2 * want), "the copy's passes read the copy's weights"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_hidden_states_are_those_of_the_modules(family: str, dtype: torch.dtype) -> None:
    """The fused pass returns them, also where logits of few tokens are wanted, and its logits are the same bits."""
    model = shaken(tiny_model(family)).to(dtype)
    plain = HuggingFaceTarget(copy.deepcopy(model), max_length=64)
    whole = HuggingFaceTarget(model, max_length=64, fused_forward=True)
    names = ("final_norm", *(f"entering:{layer}" for layer in reversed(range(whole.num_layers + 1))))
    text = torch.tensor(PROMPTS[1])
    rows, offsets = torch.tensor([0], dtype=torch.int32), torch.tensor([0, len(text)], dtype=torch.int32)

    def fed(target: HuggingFaceTarget, names: tuple[str, ...]) -> Any:
        assert target.cache.reserve(0, len(text))
        output = target.extend(rows, text, offsets, logits=torch.tensor([30, 2]), aux_hidden_states=names)
        target.cache.release([0])
        return output

    want, got = fed(plain, names), fed(whole, names)
    assert list(got.aux_hidden_states) == list(names)
    error = 1e-4 if dtype == torch.float32 else 0.05
    for name in names:
        one, other = got.aux_hidden_states[name], want.aux_hidden_states[name]
        assert one.dtype == dtype and one.shape == other.shape == (len(text), whole.hidden_size)
        size = float(other.float().square().mean().sqrt())
        assert float((one.float() - other.float()).square().mean().sqrt()) <= error * size, name
    for some in ((), names[:1], names[1:2], names[2:], names):
        alone = fed(whole, some)
        assert torch.equal(alone.logits, got.logits)
        assert all(torch.equal(alone.aux_hidden_states[name], got.aux_hidden_states[name]) for name in some)
    with pytest.raises(ValueError, match=f"got 'entering:{whole.num_layers + 1}'"):
        fed(whole, (f"entering:{whole.num_layers + 1}",))


def test_no_logits_are_computed_where_none_are_wanted() -> None:
    target = models.target("llama", fused_forward=True)
    whole: Any = target._logits
    run, wanted, stored = whole.run, [], []
    whole.run = lambda *args: wanted.append(args[3].numel()) or run(*args)
    text = torch.tensor(PROMPTS[1])
    given = torch.tensor([0], dtype=torch.int32), text, torch.tensor([0, len(text)], dtype=torch.int32)
    for logits in (False, True):
        assert target.cache.reserve(0, len(text))
        output = target.extend(*given, logits=logits)
        assert (output.logits is None) == (not logits)
        stored.append([target.cache.read(0, layer) for layer in range(target.num_layers)])
        target.cache.release([0])
    assert wanted == [0, 1]
    for one, other in zip(*stored, strict=True):
        assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])


def test_partial_passes_run_the_modules() -> None:
    target, plain = models.target("llama", fused_forward=True), models.target("llama")
    skip = SkippedLayers((1,), (0,))
    with target.skip_layers(skip), plain.skip_layers(skip):
        assert torch.equal(scored(target), scored(plain))
    assert isinstance(target._logits, FusedForward)


def test_hooks_of_transformers_are_allowed() -> None:
    model = models.own("llama")
    model(torch.tensor([[1, 2]]), output_hidden_states=True)  # leaves its hooks on the model
    assert any(module._forward_hooks for module in model.modules())
    assert HuggingFaceTarget(model, max_length=64, fused_forward=True).why_not_fused is None


def gelu() -> Any:
    return tiny_model("llama", hidden_act="gelu")


def mlp_biased() -> Any:
    return tiny_model("llama", mlp_bias=True)


def hooked() -> Any:
    model = models.own("llama")
    model.model.layers[0].register_forward_hook(lambda module, args, output: None)
    return model


def adapted() -> Any:
    model = models.own("llama")

    class Adapter(torch.nn.Linear):
        pass

    model.model.layers[1].mlp.down_proj.__class__ = Adapter
    return model


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: models.own("gpt2"), "the model is GPT2LMHeadModel; expected one of transformers' LlamaForCausalLM, "),
        (
            lambda: models.own("llama", torch.float16),
            "the model is torch.float16 on cpu; expected torch.float32 or torch.bfloat16 on cpu",
        ),
        (mlp_biased, "mlp.gate_proj is BatchInvariantLinear with a bias"),
        (gelu, "its activation is gelu; expected silu or swish or gelu_pytorch_tanh"),
        (hooked, "model.layers.0 has forward hooks"),
        (adapted, "mlp.down_proj is Adapter; expected BatchInvariantLinear"),
    ],
)
def test_what_prevents_the_fused_forward(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=f"fused_forward: got True, but .*{words}"):
        HuggingFaceTarget(make(), max_length=64, fused_forward=True)
    target = HuggingFaceTarget(make(), max_length=64, fused_forward=None)
    assert words in str(target.why_not_fused) and target._logits is target._plain_logits


def test_a_model_with_changed_code_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that was changed from outside is detected by the logits, down to a hundredth of a layer."""
    model: Any = models.own("llama")
    kind = type(model.model.layers[0].mlp)
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, hidden: 1.01 * forward(self, hidden))
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match=r"fused_forward: got True, but .*expected the same"):
        HuggingFaceTarget(model, max_length=64, fused_forward=True)
    assert model.config._attn_implementation == before, "as it was"
    target = HuggingFaceTarget(model, max_length=64, fused_forward=None)
    assert "logits that differ" in str(target.why_not_fused) and target._logits is target._plain_logits


def test_a_replaced_forward_is_reported() -> None:
    model = models.own("llama")
    model.model.layers[0].mlp.forward = lambda hidden: hidden
    target = HuggingFaceTarget(model, max_length=64, fused_forward=None)
    assert "model.layers.0.mlp has a forward of its own" in str(target.why_not_fused)


def test_another_backend_can_be_selected() -> None:
    with use_backend("reference"):
        target = models.target("llama", fused_forward=None)
    assert "q_proj is Linear; expected BatchInvariantLinear" in str(target.why_not_fused)


def test_models_are_fused_where_it_is_possible() -> None:
    engine: Any = load("demo-target", "demo-draft", max_length=64, max_rows=1)
    assert engine.target.fused_forward is not None and engine.drafter.model.fused_forward is not None
    engine = load("demo-target", max_length=64, max_rows=1, fused_forward=False)
    assert engine.target.why_not_fused == "it was not requested" and engine.target.fused_forward is None
    engine = load("demo-target", max_length=64, max_rows=1, drafter="recycling")
    assert engine.target.fused_forward is not None and engine.drafter.needs.prompt_aux_hidden_states
    engine = load("demo-target", max_length=64, max_rows=1, compile=True)
    assert engine.target.fused_forward is None
    engine = load("demo-target", "demo-draft", max_length=64, max_rows=1, compile=True, fused_forward=True)
    assert isinstance(engine.target._logits, FusedForward) and isinstance(engine.drafter.model._logits, FusedForward)
    engine = load("demo-target", "demo-draft", max_length=64, max_rows=1, dtype="bfloat16")
    assert engine.drafter.model.dtype == torch.float32 and engine.target.dtype == torch.bfloat16
    assert engine.target.why_not_fused is None
    engine = load("demo-target", load_model("demo-draft", "bfloat16"), max_length=64, max_rows=1, dtype="bfloat16")
    drafted = engine.generate(["In the"], SamplingParams(temperature=0, max_new_tokens=8))[0]
    assert engine.drafter.model.why_not_fused is None and drafted.stats.faults == 0, "passes one by one"
    with pytest.raises(ValueError, match=r"fused_forward: got True, but the model is torch\.float16"):
        load("demo-target", max_length=64, max_rows=1, dtype="float16", fused_forward=True)
    model: Any = load_model("demo-draft")
    assert HuggingFaceTarget(model, max_length=64, max_rows=1, fused_forward=True).why_not_fused is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_small_draft_of_half_precision_is_loaded_in_float32(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """This enables the fused forward. A model that the caller loaded stays as it is, and so does a large one."""

    def drafted(draft: Any) -> Any:
        drafter: Any = load("demo-target", draft, dtype=dtype, max_length=64).drafter
        return drafter.model

    small = drafted("demo-draft")
    assert small.dtype == torch.float32 and small.fused_forward is not None
    exact = load_model("demo-draft", dtype)
    for one, other in zip(small.model.parameters(), exact.parameters(), strict=True):
        assert torch.equal(one, other.float())
    assert drafted(exact).dtype == getattr(torch, dtype)
    monkeypatch.setattr(fused_forward, "SMALL_MODEL_BYTES", 2**20)
    assert drafted("demo-draft").dtype == getattr(torch, dtype)


@pytest.mark.parametrize(
    ("rule", "drafter"), [("rejection", "draft_model"), ("block", "draft_model"), ("recursive_rejection", "draft_tree")]
)
def test_a_draft_of_another_dtype_than_its_target_serves_every_rule(rule: str, drafter: str) -> None:
    engine = load("demo-target", "demo-draft", dtype="bfloat16", drafter=drafter, rule=rule, max_length=128)
    handles = engine.generate(["def main(", "In the beginning"], SamplingParams(seed=1, max_new_tokens=40))
    assert all(handle.stats.faults == 0 and len(handle.tokens) == 40 for handle in handles)
    assert engine.stats.tau > 1.5
