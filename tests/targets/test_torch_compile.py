"""torch.compile of the target: the same text, and auxiliary hidden states."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from oracles import models
from oracles.noisy_oracle import NoisyTree

from specdec_fast import Engine, HuggingFaceTarget, SamplingParams
from specdec_fast.core.draft import Draft
from specdec_fast.targets.tiny_models import tiny_model
from specdec_kernels import tree_plan

LENGTHS = (5, 17)


def compiled_text(model: Any, want: list[list[int]], drafted: int) -> HuggingFaceTarget:
    """Checks the text of a compiled target, and returns the target."""
    torch._dynamo.reset()
    prompts, new_tokens = [models.prompt(length) for length in LENGTHS], len(want[0])
    target = HuggingFaceTarget(model, max_length=64, compile=True)
    assert target._logits is not target._plain_logits
    texts = [[*prompt, *text] for prompt, text in zip(prompts, want, strict=True)]
    drafter = NoisyTree(texts, 0.8, 96, num_draft_tokens=drafted) if drafted else None
    handles = Engine(target, drafter).generate(prompts, SamplingParams(temperature=0, max_new_tokens=new_tokens))
    assert [handle.tokens for handle in handles] == want
    return target


def test_the_traced_forward_gives_the_same_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capture, guards and changing shapes, without a code generator."""
    graphs: list[Any] = []

    def count(module: Any, _inputs: Any, **_options: Any) -> Any:
        graphs.append(module)
        return module

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=count))
    want = [models.greedy_text("llama", length, 16) for length in LENGTHS]
    target = compiled_text(models.own("llama"), want, drafted=4)
    assert 1 <= len(graphs) <= 6, "captured again for every shape"
    assert target.cache.reserve(0, 8)
    draft = Draft.chains([0], [[1, 2]])
    output, _ = target.score(draft, tree_plan(draft.parents, draft.offsets), ("entering:1", "final_norm"))
    assert {name: aux_hidden_state.shape for name, aux_hidden_state in output.aux_hidden_states.items()} == {
        "entering:1": torch.Size([2, 64]),
        "final_norm": torch.Size([2, 64]),
    }


@pytest.mark.slow
def test_the_compiled_forward_gives_the_same_text() -> None:
    """With the code generator: one graph for the first pass over ragged prompts, one of dynamic shape for all later
    passes.

    The model has one layer, since a second has the same code but for a sum. Features that only help later processes are
    off: caches of graphs, whose keys are those of all files of Triton, and a pool of processes that compile Triton
    kernels.
    """
    model: Any = tiny_model("llama", num_hidden_layers=1)
    model.generation_config.eos_token_id = None
    want = []
    for length in LENGTHS:
        ids = torch.tensor([models.prompt(length)])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=6)
        want.append(out[0, length:].tolist())
    compiled = torch._dynamo.utils.counters
    compiled.clear()
    with torch._inductor.config.patch(force_disable_caches=True, compile_threads=1):
        compiled_text(model, want, drafted=0)
    assert compiled["stats"]["unique_graphs"] == 2 and compiled["inductor"]["extern_calls"] > 0


def test_targets_of_one_class_have_separate_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards on the model are not checked, so a pass of one model must not serve another."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    draft = Draft.chains([0], [[1, 2, 3]])
    tree = Draft.trees(rows=[0], trees=[([1, 2, 3], [-1, 0, 0])])
    targets = []
    for eps in (1e-6, 1.0):  # a number of the model that is part of the compiled code
        pair = [
            HuggingFaceTarget(tiny_model("llama", rms_norm_eps=eps), max_rows=1, max_length=32, compile=how)
            for how in (False, True)
        ]
        assert all(target.cache.reserve(0, 16) for target in pair)
        targets.append(pair)
    for each in (draft, tree, draft):
        for eager, ready in targets:
            plan = tree_plan(each.parents, each.offsets)
            torch.testing.assert_close(ready.score(each, plan)[0].logits, eager.score(each, plan)[0].logits)
