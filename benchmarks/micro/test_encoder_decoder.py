"""Jacobi decoding of an encoder-decoder model beside plain decoding and transformers' greedy search.

A random Marian model. Random weights say nothing of how often a guess comes true, so the number of passes goes beside
the time: their ratio is what a pass costs with one token and with a block of them.

python -m pytest benchmarks/micro/test_encoder_decoder.py
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from specdec_fast import SamplingParams
from specdec_fast.targets.encoder_decoder_jacobi import jacobi_translate

SOURCE, LENGTH = list(range(10, 40)), 32
SHAPE = {
    "vocab_size": 8000, "d_model": 256, "encoder_layers": 4, "decoder_layers": 4, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 1024, "decoder_ffn_dim": 1024, "max_position_embeddings": 128,
    "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "forced_eos_token_id": None, "decoder_start_token_id": 1,
}  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "plain": {"block": 1},
    "PJ": {},
    "PGJ of 4": {"block": 4},
    "HGJ of 4 to 16": {"block": 4, "horizon": 16},
}


@functools.cache
def model() -> Any:
    from transformers import AutoConfig, AutoModelForSeq2SeqLM

    torch.set_num_threads(1)
    torch.manual_seed(3)
    made = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("marian", **SHAPE)).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.dim() == 2:  # the usual start of training would say one token for ever
                parameter.normal_(std=0.7 if "embed" in name else 1.5 * parameter.shape[1] ** -0.5)
    return made


def generated() -> list[int]:
    found = model().generate(torch.tensor([SOURCE]), do_sample=False, num_beams=1, max_new_tokens=LENGTH)
    return list(found[0, 1:].tolist())


@pytest.mark.parametrize("name", ["generate", *WAYS])
def test_translation(benchmark: Any, name: str) -> None:
    want, params = generated(), SamplingParams(temperature=0, max_new_tokens=LENGTH)
    if name == "generate":
        assert benchmark(generated) == want
        return
    found = benchmark(lambda: jacobi_translate(model(), [SOURCE], params, **WAYS[name])[0])
    benchmark.extra_info.update(passes=found.passes, tokens=len(want))
    assert found.tokens == want, "the text is another: no time is reported on a red test"
