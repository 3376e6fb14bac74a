"""Jacobi decoding of encoder-decoder models against transformers' greedy search."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from oracles.plain_decoding import replay_choice

from specdec_fast import SamplingParams
from specdec_fast.targets.encoder_decoder_jacobi import EncoderDecoder, jacobi_translate
from specdec_fast.targets.tiny_models import tiny_model

VOCAB, LENGTH = 50, 18
SHAPE = {
    "vocab_size": VOCAB, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64,
    "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "forced_eos_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
EXTRA: dict[str, dict[str, Any]] = {
    "marian": {**SHAPE, "decoder_start_token_id": 1},
    "mbart": {**SHAPE, "decoder_start_token_id": 2},
    "t5": {"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
           "pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0, "tie_word_embeddings": False},
}  # fmt: skip
SOURCES = [[5, 6, 7, 8, 2], [9, 2], list(range(3, 30))]


@functools.cache
def model(family: str) -> Any:
    """Returns a random model in float64, with distinct logits."""
    from transformers import AutoConfig, AutoModelForSeq2SeqLM

    torch.manual_seed(3)
    made = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(family, **EXTRA[family])).double().eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.dim() == 2:
                embeds = "embed" in name or "shared" in name
                parameter.normal_(std=0.7 if embeds else 1.5 * parameter.shape[1] ** -0.5)
    return made


class settings:
    """Changes generation settings of a model within a block."""

    def __init__(self, made: Any, **changes: Any) -> None:
        self.config, self.changes = made.generation_config, changes

    def __enter__(self) -> None:
        self.before = {name: getattr(self.config, name) for name in self.changes}
        for name, value in self.changes.items():
            setattr(self.config, name, value)

    def __exit__(self, *_: Any) -> None:
        for name, value in self.before.items():
            setattr(self.config, name, value)


def generated(made: Any, source: list[int], length: int = LENGTH) -> list[int]:
    out = made.generate(torch.tensor([source]), do_sample=False, num_beams=1, max_new_tokens=length)
    return list(out[0, 1:].tolist())


def greedy(length: int = LENGTH) -> SamplingParams:
    return SamplingParams(temperature=0, max_new_tokens=length)


@pytest.mark.parametrize("options", [{}, {"block": 3}, {"block": 1}, {"block": 4, "horizon": 9}], ids=str)
@pytest.mark.parametrize("family", list(EXTRA))
def test_the_text_is_that_of_generate(family: str, options: dict[str, Any]) -> None:
    made = model(family)
    got = jacobi_translate(made, SOURCES, greedy(), **options)
    want = [generated(made, source) for source in SOURCES]
    assert [each.tokens for each in got] == want
    assert all(each.passes <= len(each.tokens) for each in got)
    assert len({tuple(text) for text in want}) >= 2, "the decoder looks at its source"
    for source, each in zip(SOURCES, got, strict=True):
        assert jacobi_translate(made, [source], greedy(), **options) == [each]


@pytest.mark.parametrize(
    "changes",
    [
        {"forced_bos_token_id": 7},
        {"forced_eos_token_id": 2},
        {"bad_words_ids": [[11], [4, 5]]},
        {"no_repeat_ngram_size": 2},
        {"repetition_penalty": 1.8},
        {"suppress_tokens": list(range(10, 30))},
        {"eos_token_id": list(range(40)), "min_length": 5},
        {"eos_token_id": list(range(40)), "min_new_tokens": 4},
        {"forced_bos_token_id": 7, "forced_eos_token_id": 2, "no_repeat_ngram_size": 3},
    ],
    ids=str,
)
def test_settings_hold_at_every_position_of_a_guess(changes: dict[str, Any]) -> None:
    made = model("mbart")
    with settings(made, **changes):
        for options in ({}, {"block": 4}):
            got = jacobi_translate(made, SOURCES, greedy(), **options)
            assert [each.tokens for each in got] == [generated(made, source) for source in SOURCES]


def test_the_right_fill_needs_one_pass_per_block_and_blocks_of_one_are_plain_decoding() -> None:
    made = model("marian")
    want = generated(made, SOURCES[0])
    for block in (None, 1, 5, LENGTH):
        got = jacobi_translate(
            made, SOURCES[:1], greedy(), block=block, fill=lambda text, count: want[len(text) - 1 :]
        )[0]
        assert got.tokens == want and got.passes == -(-len(want) // (block or LENGTH))
    assert jacobi_translate(made, SOURCES[:1], greedy(), block=1)[0].passes == len(want)
    assert jacobi_translate(made, SOURCES[:1], greedy(), horizon=1)[0].passes == len(want)
    whole = jacobi_translate(made, SOURCES[:1], greedy())[0]
    assert whole == jacobi_translate(made, SOURCES[:1], greedy(), block=LENGTH)[0]
    for fill in (0, 2, 17):
        assert jacobi_translate(made, SOURCES[:1], greedy(), fill=fill)[0].tokens == want


@pytest.mark.parametrize("options", [{}, {"block": 70}, {"horizon": 90}], ids=str)
def test_a_guess_ends_with_the_positions_of_the_decoder(options: dict[str, Any]) -> None:
    """The decoder has 64 positions. Texts equal those of generate up to there."""
    made = model("marian")
    for ends, length in ((list(range(25)), 100), (None, 64)):
        with settings(made, eos_token_id=ends):
            want = generated(made, SOURCES[0], length)
            assert jacobi_translate(made, SOURCES[:1], greedy(length), **options)[0].tokens == want
            assert ends is not None or len(want) == 64


def test_sampling_is_plain_decoding_with_the_same_noise() -> None:
    made, source = model("marian"), SOURCES[0]
    ids = torch.tensor([source])
    for seed in range(3):
        params = SamplingParams(temperature=0.9, top_p=0.9, seed=seed, max_new_tokens=LENGTH)
        text = [1]
        while len(text) <= LENGTH and (len(text) == 1 or text[-1] != 2):
            with torch.no_grad():
                logits = made(input_ids=ids, decoder_input_ids=torch.tensor([text]), use_cache=False).logits[0, -1]
            text.append(replay_choice(logits.numpy(), params, len(text)))
        for block in (None, 4):
            got = jacobi_translate(made, [source], params, block=block)[0]
            assert got.tokens == text[1:] and got.passes <= len(got.tokens)


def test_a_truncated_cache_equals_a_fresh_pass() -> None:
    made = model("mbart")
    row = EncoderDecoder(made, SOURCES[0])
    row.score([], [2, 5, 6, 7])
    row.truncate(2)
    row.score([2, 5], [9, 9, 4])
    row.truncate(4)
    fresh = EncoderDecoder(made, SOURCES[0])
    logits = fresh.score([], [2, 5, 9, 9])
    stored, want = (each._cache.self_attention_cache.layers for each in (row, fresh))
    for one, other in zip(stored, want, strict=True):
        assert one.keys.shape == other.keys.shape
        assert torch.allclose(one.keys, other.keys) and torch.allclose(one.values, other.values)
    row.truncate(3)
    assert torch.allclose(row.score([2, 5, 9], [9])[0], logits[-1])


def test_an_end_inside_a_guess_that_is_not_final_is_ignored() -> None:
    made = model("marian")
    assert jacobi_translate(made, SOURCES, greedy(), fill=2) == [
        type(got)(generated(made, source), got.passes)
        for source, got in zip(SOURCES, jacobi_translate(made, SOURCES, greedy(), fill=2), strict=True)
    ]
    with settings(made, eos_token_id=list(range(25))):
        for source, got in zip(SOURCES, jacobi_translate(made, SOURCES, greedy()), strict=True):
            assert got.tokens == generated(made, source) and not [token for token in got.tokens[:-1] if token < 25]


def test_bad_input() -> None:
    made = model("marian")
    with pytest.raises(ValueError, match="LlamaForCausalLM: got a model without an encoder"):
        jacobi_translate(tiny_model("llama"), SOURCES)
    for options, message in (
        ({"block": 0}, "jacobi_translate block: got 0; expected a whole number of at least 1"),
        ({"horizon": -3}, "jacobi_translate horizon: got -3"),
        ({"fill": -1}, r"jacobi_translate fill: got token id -1; expected 0\.\.49"),
        ({"fill": VOCAB}, "jacobi_translate fill: got token id 50"),
        ({"params": SamplingParams(stop=("a",))}, r"jacobi_translate stop: got \('a',\); expected none; stop_token_"),
    ):
        with pytest.raises(ValueError, match=message):
            jacobi_translate(made, SOURCES, **options)
    for source in ([], [VOCAB + 2], [-1]):
        with pytest.raises(ValueError, match="source: got"):
            jacobi_translate(made, [source])
    with pytest.raises(ValueError, match=r"expected them in model\.generation_config"):
        jacobi_translate(made, SOURCES, SamplingParams(repetition_penalty=1.2))
    for changes in ({"sequence_bias": {(5,): 2.0}}, {"encoder_repetition_penalty": 1.3}):
        (name,) = changes
        with settings(made, **changes), pytest.raises(ValueError, match=f"setting {name}: got .* not supported here"):
            jacobi_translate(made, SOURCES)
    with settings(made, encoder_repetition_penalty=1.0):
        assert len(jacobi_translate(made, SOURCES[:1], greedy(2))[0].tokens) == 2
