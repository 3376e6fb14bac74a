"""Texts of real models in float32: transformers' own, token for token, with every drafter that needs no training."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles.real_models import RealModel

from specdec_fast import SamplingParams, load
from specdec_fast.drafters import drafter_names
from specdec_fast.retrieval.datastore import build

STORY = "It was a dark and stormy night, and the"
COUNT = "一二三四五六七八九十，一二三四五六七八"
SMILE = "🙂🙃😀 🙂🙃😀 🙂🙃😀 🙂"
CAPITAL = "中国的首都是北京。中国的首都是"
GREEDY = SamplingParams(temperature=0, max_new_tokens=24)
SAMPLED = SamplingParams(temperature=0.8, top_k=64, top_p=0.95, seed=5, max_new_tokens=16)
NEED_TRAINING = {"blockwise", "eagle", "eagle3", "medusa", "mtp"}
OPTIONS: dict[str, dict[str, Any]] = {
    "auto": {},
    "draft_model": {"num_draft_tokens": 3},
    "draft_tree": {"num_draft_tokens": 6},
    "forest": {"num_draft_tokens": 8},
    "jacobi": {"num_draft_tokens": 5},
    "layer_skip": {"num_draft_tokens": 3},
    "lookahead": {"window": 3, "ngram": 3, "guesses": 3},
    "ngram": {"num_draft_tokens": 6},
    "recycling": {"num_draft_tokens": 8},
    "rest": {"num_draft_tokens": 8},
    "suffix": {"num_draft_tokens": 8},
}
"""Drafters that need no training, with drafts short enough for tests."""


def test_no_drafter_is_left_out() -> None:
    assert set(OPTIONS) == set(drafter_names()) - NEED_TRAINING


class Texts:
    """Tests of both models."""

    MODEL = ""

    @pytest.mark.parametrize("drafter", [None, *OPTIONS])
    def test_texts_are_those_of_transformers(self, real: RealModel, drafter: str | None, tmp_path: Path) -> None:
        """Greedy and sampled requests in one batch. The sampled one is replayed by passes without a cache."""
        prompts = [real.tokenizer.encode(text) for text in (STORY, COUNT, STORY)]
        params = [GREEDY, GREEDY, SAMPLED]
        want = [real.greedy(prompt, GREEDY.max_new_tokens) for prompt in prompts[:2]]
        want.append(real.sampled(prompts[2], SAMPLED))
        options, draft = dict(OPTIONS.get(drafter or "", {})), None
        if drafter == "rest":
            build(tmp_path / "texts", [prompts[1] * 3, prompts[0]], vocab_size=len(real.tokenizer))
            options |= {"datastore": str(tmp_path / "texts")}
        if drafter is not None and drafter.startswith("draft_"):
            draft = copy.deepcopy(real.model)
        with load(
            real.model,
            draft,
            tokenizer=real.tokenizer,
            drafter=drafter or "none",
            drafter_options=options,
            max_length=128,
        ) as engine:
            handles = engine.generate(prompts, params)
            for handle, tokens in zip(handles, want):
                assert handle.error is None and handle.tokens == tokens, real.tokenizer.decode(handle.prompt)
                assert handle.text == real.tokenizer.decode(tokens, skip_special_tokens=True)
        assert engine.stats.faults == 0
        if drafter is not None:
            assert sum(handle.stats.num_draft_tokens for handle in handles) > 0
        if drafter not in (None, "jacobi", "layer_skip"):  # those two guess badly without tuning
            copied = handles[1].stats
            assert copied.steps < copied.new_tokens, "no draft was accepted in a text that repeats itself"

    def test_streams_break_no_character(self, real: RealModel) -> None:
        prompts = [real.tokenizer.encode(text) for text in (COUNT, SMILE, CAPITAL)]
        want = [real.greedy(prompt, GREEDY.max_new_tokens) for prompt in prompts]
        with load(real.model, tokenizer=real.tokenizer, drafter="suffix", max_length=128) as engine:
            for prompt, tokens in zip(prompts, want):
                handle = engine.submit(prompt, GREEDY)
                pieces = list(engine.stream(handle))
                assert handle.tokens == tokens
                assert "".join(pieces) == handle.text == real.tokenizer.decode(tokens, skip_special_tokens=True)
                assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces[:-1])
                assert not handle.text.isascii() and len(pieces) >= handle.stats.steps - 1
        assert "北京" in handle.text, "weights are converted wrongly, or the vocabulary is"


class TestGemma3(Texts):
    MODEL = "gemma3"

    @pytest.mark.parametrize("drafter", [None, "suffix"])
    def test_the_text_crosses_the_sliding_window(self, real: RealModel, drafter: str | None) -> None:
        """One text crosses the window, and another begins beyond it: without the window it would be another one."""
        window = real.model.config.sliding_window
        assert window == 512
        steps = " ".join(f"Step {number}: add {number * 7} to the sum." for number in range(60))
        words = real.tokenizer.encode(f"My cat is called Otto and my favorite color is teal. {steps}")
        question = real.tokenizer.encode("\n\nIn conclusion,", add_special_tokens=False)
        prompts = [[*words[:length], *question] for length in (494, 540)]
        assert len(prompts[0]) < window < len(prompts[0]) + 20 and len(prompts[1]) > window
        want = [real.greedy(prompt, 20) for prompt in prompts]
        params = SamplingParams(temperature=0, max_new_tokens=20)
        with load(
            real.model, tokenizer=real.tokenizer, drafter=drafter or "none", max_rows=2, max_length=640
        ) as engine:
            handles = engine.generate(prompts, params)
            assert [handle.tokens for handle in handles] == want
        if drafter is not None:
            assert all(handle.stats.num_draft_tokens > 0 for handle in handles)


class TestSmolLM2(Texts):
    MODEL = "smollm2"

    def test_a_chat_is_the_templates_prompt(self, real: RealModel) -> None:
        """Two turns: what `apply_chat_template` and `generate` give, each answer with its end."""
        params = SamplingParams(temperature=0, max_new_tokens=32)
        turns: list[dict[str, str]] = []
        wanted = []
        for question in ("What is the capital of France?", "And of Spain?"):
            turns.append({"role": "user", "content": question})
            ids = real.tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
            wanted.append((list(turns), ids, real.greedy(ids, 32)))
            turns.append(
                {"role": "assistant", "content": real.tokenizer.decode(wanted[-1][2], skip_special_tokens=True)}
            )
        with load(real.model, tokenizer=real.tokenizer, drafter="suffix", max_length=256) as engine:
            for messages, ids, tokens in wanted:
                handle = engine.chat(messages, params)
                assert list(handle.prompt) == ids and handle.tokens == tokens
                assert handle.finish_reason == "eos" and "<|" not in handle.text
        assert handle.text == "The capital of Spain is Madrid." and handle.stats.cached_tokens > 0

    def test_a_file_is_its_folder(self, real: RealModel, tmp_path: Path) -> None:
        """A GGUF file, the float32 folder that it stands for, and what transformers reads from the file."""
        from transformers import AutoModelForCausalLM, GgufConfig

        theirs = AutoModelForCausalLM.from_pretrained(
            real.file.parent,
            gguf_file=real.file.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        )
        own = real.model.state_dict()
        assert all(torch.equal(own[name], weight) for name, weight in theirs.state_dict().items())
        theirs.save_pretrained(tmp_path)
        real.tokenizer.save_pretrained(tmp_path)
        prompt = real.tokenizer.encode(STORY)
        want = real.greedy(prompt, GREEDY.max_new_tokens)
        for place in (real.file, tmp_path):
            with load(place, drafter="suffix", max_length=64) as engine:
                handle = engine.generate([STORY], GREEDY)[0]
            assert list(handle.prompt) == prompt and handle.tokens == want, place
        (tmp_path / "model.safetensors").unlink()
