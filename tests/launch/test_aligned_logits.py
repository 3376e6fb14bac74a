"""Rows of logits that begin where wide loads can read them, for vocabularies that 16 does not divide."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracles import models

from specdec_fast import Draft, Engine, HuggingFaceTarget, SamplingParams
from specdec_fast.targets.linear_layers import AlignedLogits
from specdec_fast.targets.tiny_models import tiny_model
from specdec_kernels import simulated_gpu


def target(device: str, vocab: int = 97) -> HuggingFaceTarget:
    return HuggingFaceTarget(tiny_model("llama", vocab_size=vocab).to(device), max_length=64, max_rows=2)


def text(made: HuggingFaceTarget) -> list[int]:
    params = SamplingParams(seed=3, temperature=0.9, top_p=0.9, max_new_tokens=12)
    return Engine(made).generate([models.prompt(9)], params)[0].tokens


def test_rows_are_aligned_and_texts_are_those_of_the_cpu() -> None:
    want = text(target("cpu"))
    with simulated_gpu.gpu("sm_90"):
        made = target("cuda")
        draft = Draft.chains([0], [[1, 2, 3]], device=made.device)
        made.cache.reserve(0, 8)
        logits: Any = made.score(draft, draft.get_plan())[0].logits
        assert logits.shape == (3, 97) and logits.stride() == (112, 1)
        made.cache.release([0])
        assert text(made) == want


def test_a_vocabulary_that_16_divides_keeps_its_projection() -> None:
    with simulated_gpu.gpu("sm_90"):
        assert type(target("cuda", 96).model.get_output_embeddings()) is torch.nn.Linear


@pytest.mark.parametrize("bias", [False, True])
def test_logits_are_those_of_the_projection(bias: bool) -> None:
    plain = torch.nn.Linear(8, 33, bias=bias)
    hidden = torch.randn(1, 5, 8)
    want = plain(hidden)
    with simulated_gpu.gpu("sm_90"):
        head, on_gpu = plain.to("cuda"), hidden.to("cuda")
        head.__class__ = AlignedLogits
        found = head(on_gpu)
        assert found.stride(1) == 48 and torch.equal(found.cpu(), want.detach())
    head = AlignedLogits(8, 33)
    assert head(hidden).is_contiguous() and head(hidden).requires_grad, "on a CPU it is what it was"
