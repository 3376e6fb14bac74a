"""torch.compile of the target: the same text, and taps that still work."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from oracles import models
from oracles.noisy_oracle import NoisyTree

from specdec_fast import Engine, HuggingFaceTarget, SamplingParams
from specdec_fast.draft import Draft
from specdec_kernels import tree_plan

LENGTHS = (5, 17)


def compiled_text(new_tokens: int, drafted: int) -> HuggingFaceTarget:
    """Check the text of a compiled target; returns it."""
    torch._dynamo.reset()
    prompts = [models.prompt(length) for length in LENGTHS]
    want = [models.greedy_text("llama", length, new_tokens) for length in LENGTHS]
    target = HuggingFaceTarget(models.own("llama"), max_length=64, compile=True)
    assert target._forward is not target.model.forward
    texts = [[*prompt, *text] for prompt, text in zip(prompts, want, strict=True)]
    drafter = NoisyTree(texts, 0.8, 96, num_draft_tokens=drafted) if drafted else None
    handles = Engine(target, drafter).generate(prompts, SamplingParams(temperature=0, max_new_tokens=new_tokens))
    assert [handle.tokens for handle in handles] == want
    return target


def test_the_captured_forward_gives_the_same_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capture, guards and changing shapes, without waiting for a code generator."""
    graphs: list[Any] = []

    def count(module: Any, _inputs: Any) -> Any:
        graphs.append(module)
        return module

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=count))
    target = compiled_text(16, drafted=4)
    assert 1 <= len(graphs) <= 6, "captured again for every shape"
    assert target.cache.reserve(0, 8)
    draft = Draft.chains([0], [[1, 2]])
    output, _ = target.score(draft, tree_plan(draft.parents, draft.offsets), ("entering:1", "final_norm"))
    assert {name: tap.shape for name, tap in output.taps.items()} == {
        "entering:1": torch.Size([2, 64]),
        "final_norm": torch.Size([2, 64]),
    }


@pytest.mark.slow
def test_the_compiled_forward_gives_the_same_text() -> None:
    compiled_text(6, drafted=0)
