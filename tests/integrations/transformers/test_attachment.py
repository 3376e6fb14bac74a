"""`attach` and `detach`: what users see, what is restored, and what is refused."""

from __future__ import annotations

import copy
import inspect
import json
import shutil
from typing import Any

import pytest
import torch
from integrations.transformers.conftest import load_target

from specdec_fast.engine.engine import Engine
from specdec_fast.integrations.transformers import Attachment, attach, attached, detach
from specdec_fast.loading import ASSETS
from specdec_fast.targets.attention import OutsideTargetError
from specdec_fast.targets.tiny_models import tiny_model

IDS = torch.tensor([[5, 6, 7, 8]])
KINDS = ("gpt2", "gemma3")


def state_of(model: Any) -> list[Any]:
    """Everything of a model that an engine changes."""
    layers = [(type(each), each.training) for each in model.modules()]
    weights = [(each.data_ptr() != 0, each.stride(), each.shape) for each in model.parameters()]
    return [layers, weights, model.config._attn_implementation, sorted(vars(model)), model.generate]


@pytest.fixture
def tiny() -> Any:
    return tiny_model("llama")


@pytest.mark.parametrize("family", ["llama", *KINDS])
def test_detach_leaves_the_model_as_it_was(family: str) -> None:
    model = tiny_model(family).train()
    before, values = state_of(model), [each.clone() for each in model.parameters()]
    assert attach(model, drafter="ngram") is model
    assert isinstance(model.generate, Attachment)
    model.generate(IDS, max_new_tokens=4, do_sample=False)
    assert detach(model) is model
    assert state_of(model) == before
    assert all(torch.equal(*each) for each in zip(model.parameters(), values, strict=True))


def test_a_generate_of_the_user_comes_back(tiny: Any) -> None:
    own = tiny.generate = lambda *_, **__: "own"
    attach(tiny)
    assert tiny.generate is not own
    assert detach(tiny).generate is own


def test_with_ends_the_attachment(tiny: Any) -> None:
    with attached(attach(tiny)) as attachment:
        assert tiny.generate is attachment
    assert attachment.engine.closed
    assert "generate" not in vars(tiny)


def test_attached_twice_and_detached_twice(tiny: Any) -> None:
    attach(tiny)
    with pytest.raises(ValueError, match=r"attached already; expected another; call detach\(model\) first"):
        attach(tiny)
    detach(tiny)
    for call in (detach, attached):
        with pytest.raises(ValueError, match="got LlamaForCausalLM, which is not attached; expected"):
            call(tiny)
    detach(attach(tiny))


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "rule": ({"rule": "nonsense"}, "rule"),
    "drafter": ({"drafter": "nonsense"}, "drafter"),
    "itself": ({"draft": "itself"}, "draft: got the target itself; expected another model"),
    "fallback": ({"fallback": "vllm"}, "fallback 'vllm'; expected None or 'transformers'"),
    "option": ({"max_rows": 0}, "max_rows: got 0; expected at least 1"),
    "sampling": ({"sampling": "model"}, "got sampling, which every call decides; expected it elsewhere"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_failed_attach_leaves_the_model_as_it_was(name: str, tiny: Any) -> None:
    before = state_of(tiny)
    options, words = BAD[name]
    options = {key: tiny if value == "itself" else value for key, value in options.items()}
    with pytest.raises(ValueError, match=words):
        attach(tiny, **options)
    assert state_of(tiny) == before
    detach(attach(tiny))


def test_an_interrupted_attach_leaves_the_model_as_it_was(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before, started = state_of(tiny), Engine.__init__

    def interrupted(self: Any, *args: Any, **kwargs: Any) -> None:
        started(self, *args, **kwargs)
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "__init__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        attach(tiny)
    assert state_of(tiny) == before


def test_a_draft_of_another_tokenizer_is_refused(tmp_path: Any) -> None:
    """Also one that is loaded already: the tokenizers beside the files count."""
    from transformers import AutoModelForCausalLM

    shutil.copytree(ASSETS / "demo-draft", tmp_path / "other")
    file = tmp_path / "other" / "tokenizer.json"
    saved = json.loads(file.read_text())
    first, second = (next(token for token, at in saved["model"]["vocab"].items() if at == id) for id in (300, 301))
    saved["model"]["vocab"] |= {first: 301, second: 300}
    file.write_text(json.dumps(saved))
    model = load_target()
    for draft in (tmp_path / "other", AutoModelForCausalLM.from_pretrained(tmp_path / "other")):
        with pytest.raises(ValueError, match="draft: its tokenizer differs from the target's: 2 of"):
            attach(model, draft)
    assert "generate" not in vars(model)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("demo-target", r"got str; expected a transformers model with generate; load it with AutoModelForCausalLM"),
        (torch.nn.Linear(2, 2), "got Linear; expected a transformers model with generate; load one"),
    ],
)
def test_what_is_no_model_is_refused(model: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        attach(model)


def test_a_peft_model_is_attached_by_its_base(tiny: Any) -> None:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(tiny, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)).eval()
    with pytest.raises(ValueError, match=r"attach model\.get_base_model\(\)"):
        attach(adapted)
    expected = adapted.generate(input_ids=IDS, max_new_tokens=8, do_sample=False)
    attach(adapted.get_base_model(), drafter="ngram")
    assert torch.equal(adapted.generate(input_ids=IDS, max_new_tokens=8, do_sample=False), expected)
    assert attached(adapted.get_base_model()).engine.stats.steps > 0


def test_an_encoder_decoder_is_refused_in_words() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    model = T5ForConditionalGeneration(T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2))
    with pytest.raises(ValueError, match="encoder"):
        attach(model)
    assert "generate" not in vars(model)


def test_the_model_s_own_forward_works_between_calls(tiny: Any) -> None:
    """Evaluation loops call the model and its `generate` in turn; so do steps of training."""
    padded = {
        "input_ids": torch.tensor([[0, 0, 5, 6], [3, 4, 5, 6]]),
        "attention_mask": torch.tensor([[0, 0, 1, 1], [1] * 4]),
    }
    own = copy.deepcopy(tiny)
    attach(tiny, drafter="ngram")
    for _ in range(2):
        torch.testing.assert_close(tiny(**padded).logits, own(**padded).logits)
        tiny.generate(IDS, max_new_tokens=4, do_sample=False)
    loss = tiny(input_ids=IDS, labels=IDS).loss
    loss.backward()
    own(input_ids=IDS, labels=IDS).loss.backward()
    for ours, theirs in zip(tiny.parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_generate_follows_trained_weights(tiny: Any) -> None:
    attach(tiny, drafter="ngram")
    before = tiny.generate(IDS, max_new_tokens=8, do_sample=False)
    with torch.no_grad():
        for weight in tiny.parameters():
            weight.mul_(-1.3)
    own = copy.deepcopy(tiny)
    del own.generate
    expected = own.generate(IDS, max_new_tokens=8, do_sample=False)
    assert torch.equal(tiny.generate(IDS, max_new_tokens=8, do_sample=False), expected)
    assert not torch.equal(before, expected)


def test_an_attention_that_is_set_between_calls_stays(tiny: Any) -> None:
    attach(tiny, drafter="ngram")
    tiny.set_attn_implementation("eager")
    tiny.generate(IDS, max_new_tokens=4, do_sample=False)
    assert tiny.config._attn_implementation == "eager"
    detach(tiny)


def test_inside_a_step_the_model_is_the_engine_s(tiny: Any) -> None:
    """A processor that calls the model itself gets an error instead of wrong attention."""
    attach(tiny, fused_forward=False, check_processors=False)

    def asks_the_model(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        tiny(input_ids)
        return scores

    with pytest.raises(OutsideTargetError):
        tiny.generate(IDS, max_new_tokens=4, do_sample=False, logits_processor=[asks_the_model])
    assert tiny.generate(IDS, max_new_tokens=4, do_sample=False).shape == (1, 8)
    tiny(IDS)


def test_a_copy_says_that_the_engine_stayed_behind(tiny: Any, tmp_path: Any) -> None:
    expected = tiny.generate(IDS, max_new_tokens=4, do_sample=False)
    attach(tiny)
    torch.save(tiny, tmp_path / "model.pt")
    for twin in (copy.deepcopy(tiny), torch.load(tmp_path / "model.pt", weights_only=False)):
        with pytest.raises(RuntimeError, match="got a copy of an attached model; expected the original"):
            twin.generate(IDS)
        assert torch.equal(attach(twin).generate(IDS, max_new_tokens=4, do_sample=False), expected)
        assert "generate" not in vars(detach(twin))
    tiny.save_pretrained(tmp_path / "saved")
    again = type(tiny).from_pretrained(tmp_path / "saved")
    assert torch.equal(again.generate(IDS, max_new_tokens=4, do_sample=False), expected)


def test_what_programs_ask_of_generate(tiny: Any) -> None:
    own = inspect.signature(tiny.generate)
    attach(tiny)
    assert inspect.signature(tiny.generate) == own
    assert "Attachment(LlamaForCausalLM" in repr(tiny.generate)
    assert "streamer" in (tiny.generate.__doc__ or "")
    assert torch.equal(
        tiny.generate(IDS, None, max_new_tokens=3, do_sample=False),
        tiny.generate(inputs=IDS, max_new_tokens=3, do_sample=False),
    )
    with pytest.raises(TypeError, match="got 30 arguments without a name"):
        tiny.generate(*[None] * 30)


def test_two_models_are_attached_at_once(tiny: Any) -> None:
    other, twin = tiny_model("llama", seed=3), copy.deepcopy(tiny)
    draft = tiny_model("llama", num_hidden_layers=1)
    for model in (tiny, other):
        attach(model, draft)
    for _ in range(2):
        assert torch.equal(
            tiny.generate(IDS, max_new_tokens=9, do_sample=False), twin.generate(IDS, max_new_tokens=9, do_sample=False)
        )
        assert not torch.equal(
            other.generate(IDS, max_new_tokens=9, do_sample=False),
            tiny.generate(IDS, max_new_tokens=9, do_sample=False),
        )
    detach(tiny)
    assert other.generate(IDS, max_new_tokens=9, do_sample=False).shape == (1, 13)


def test_ids_beyond_the_tokenizer_are_generated_as_in_transformers() -> None:
    """transformers samples from all rows of the projection, whatever the tokenizer knows."""
    from transformers import AutoTokenizer

    model = load_target()
    model.resize_token_embeddings(1100)
    expected = model.generate(IDS, max_new_tokens=2, do_sample=False, return_dict_in_generate=True, output_scores=True)
    attach(model, "demo-draft", tokenizer=AutoTokenizer.from_pretrained(ASSETS / "demo-target"))
    found = model.generate(IDS, max_new_tokens=2, do_sample=False, return_dict_in_generate=True, output_scores=True)
    assert [scores.shape for scores in found.scores] == [scores.shape for scores in expected.scores]
    torch.testing.assert_close(found.scores, expected.scores, rtol=1e-4, atol=1e-4)
    limited = {"suppress_tokens": list(range(1024))}
    assert int(model.generate(IDS, max_new_tokens=2, do_sample=False, **limited)[0, -1]) >= 1024


def test_a_draft_that_cannot_be_compared_is_refused_by_size_or_named(tiny: Any, caplog: Any) -> None:
    for draft in ("demo-draft", load_target()):
        with pytest.raises(ValueError, match="got a vocabulary of 1024 tokens, and no tokenizer of the target"):
            attach(tiny, draft)
        assert "generate" not in vars(tiny)
    attach(tiny, tiny_model("llama", num_hidden_layers=1))
    assert caplog.text.count("the two were not compared; pass tokenizer= to attach") == 1


def test_a_draft_without_a_tokenizer_is_refused_by_size_or_named(tiny: Any, caplog: Any) -> None:
    """The target's is known, so only that of the draft is missing."""
    with pytest.raises(ValueError, match="got a vocabulary of 96 tokens, and no tokenizer of the draft; expected"):
        attach(load_target(), tiny)
    draft = load_target()
    draft.config.name_or_path = ""
    attach(load_target(), draft)
    assert caplog.text.count("no tokenizer of the draft, so the two were not compared; pass the draft as") == 1


def test_unknown_arguments_are_those_of_attach(tiny: Any) -> None:
    with pytest.raises(TypeError, match=r"attach: argument: got 'num_draft_token'; .*did you mean 'num_draft_tokens'"):
        attach(tiny, num_draft_token=3)
    assert "generate" not in vars(tiny)
