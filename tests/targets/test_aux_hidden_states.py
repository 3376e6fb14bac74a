"""Auxiliary hidden states equal transformers' hidden states, for every node of every pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from oracles import models
from oracles.noisy_oracle import NoisyTree

from specdec_fast import Engine, SamplingParams
from specdec_fast.core.draft import Draft
from specdec_fast.interfaces import Needs, TargetOutput
from specdec_kernels import tree_plan

AUX_HIDDEN_STATES = ("entering:0", "entering:1", "final_norm")


def states(family: str, text: list[int]) -> dict[str, torch.Tensor]:
    """Returns output_hidden_states of the untouched model, [length, hidden] by name."""
    with torch.no_grad():
        found = models.untouched(family)(torch.tensor([text]), output_hidden_states=True, use_cache=False).hidden_states
    return {name: hidden[0] for name, hidden in zip(AUX_HIDDEN_STATES, found, strict=True)}


@pytest.mark.parametrize("family", models.FAMILY_NAMES)
def test_aux_hidden_states_are_the_hidden_states_of_transformers(family: str) -> None:
    target = models.target(family)
    text = models.prompt(40)
    assert target.cache.reserve(0, 60) and target.cache.reserve(1, 60)
    for logits in (False, True):
        output = target.extend(
            torch.tensor([0, 1], dtype=torch.int32),
            torch.tensor([*text[:20], *text[:5]] if not logits else [*text[20:], *text[5:9]]),
            torch.tensor([0, 20, 25] if not logits else [0, 20, 24], dtype=torch.int32),
            logits=logits,
            aux_hidden_states=AUX_HIDDEN_STATES,
        )
        want = states(family, text)
        for name in AUX_HIDDEN_STATES:
            got = output.aux_hidden_states[name]
            expected = torch.cat(
                [want[name][:20], want[name][:5]] if not logits else [want[name][20:40], want[name][5:9]]
            )
            assert got.shape == expected.shape and torch.allclose(got, expected, atol=2e-4), (name, logits)
    draft = Draft.trees([0, 1], [([7, 8, 9], [-1, 0, 0]), ([5], [-1])])
    output, _ = target.score(draft, tree_plan(draft.parents, draft.offsets), AUX_HIDDEN_STATES)
    for node, path in enumerate(([7], [7, 8], [7, 9])):
        want = states(family, [*text, *path])
        for name in AUX_HIDDEN_STATES:
            assert torch.allclose(output.aux_hidden_states[name][node], want[name][-1], atol=2e-4)
    assert output.logits is not None and set(output.aux_hidden_states) == set(AUX_HIDDEN_STATES)
    assert torch.allclose(target.lm_head(output.aux_hidden_states["final_norm"]), output.logits, atol=1e-4)
    assert not target.model.base_model._forward_hooks, "a auxiliary hidden state was left behind"


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_state_behind_the_last_layer_is_the_one_that_the_final_norm_reads(family: str) -> None:
    target, text = models.target(family), models.prompt(17)
    assert target.cache.reserve(0, 20)
    shape = torch.tensor([0], dtype=torch.int32), torch.tensor(text), torch.tensor([0, 17], dtype=torch.int32)
    hooks = [len(layer._forward_hooks) for layer in target.layers]
    output = target.extend(*shape, logits=False, aux_hidden_states=("entering:2", "final_norm"))
    assert [len(layer._forward_hooks) for layer in target.layers] == hooks
    last, read = models.untouched(family).base_model.layers[-1], []
    hook = last.register_forward_hook(lambda _, __, out: read.append(out[0] if isinstance(out, tuple) else out))
    want = states(family, text)["final_norm"]
    hook.remove()
    got = output.aux_hidden_states["entering:2"]
    assert torch.allclose(got, read[0][0], atol=2e-4) and not torch.allclose(got, want, atol=1e-2)


@pytest.mark.parametrize("name", ["entering:3", "entering:-1", "entering:x", "leaving:0", "final"])
def test_unknown_aux_hidden_states_are_named_and_leave_no_hook(name: str) -> None:
    target = models.target("llama")
    assert target.cache.reserve(0, 8)
    draft = Draft.chains([0], [[1]])
    with pytest.raises(
        ValueError, match=f"auxiliary hidden state: got '{name}'; expected 'final_norm' or 'entering:i' with i <= 2"
    ):
        target.score(draft, tree_plan(draft.parents, draft.offsets), ("entering:0", name))
    assert not any(layer._forward_pre_hooks for layer in target.layers)


class Listener(NoisyTree):
    """A drafter that checks the auxiliary hidden states it gets."""

    needs = Needs(topology="tree", host_tokens=True, aux_hidden_states=("entering:1", "final_norm"))
    observed = 0

    def begin(self, view: Any, rows: Sequence[int], prompt_output: TargetOutput | None) -> None:
        super().begin(view, rows, prompt_output)
        start = 0
        assert prompt_output is not None
        for row in rows:
            text = list(view.tokens(row))[:-1]
            want = states("llama", text)
            for name in self.needs.aux_hidden_states:
                got = prompt_output.aux_hidden_states[name][start : start + len(text)]
                assert torch.allclose(got, want[name], atol=2e-4), (row, name)
            start += len(text)

    def observe(self, view: Any, draft: Any, acceptance: Any, output: TargetOutput) -> None:
        assert output.aux_hidden_states["final_norm"].shape[0] == draft.num_nodes
        for at, row in enumerate(draft.rows.tolist()):
            path = [node for node in acceptance.path[at].tolist() if node >= 0]
            text = list(view.tokens(row))[:-1]  # up to the last accepted node
            if len(path) == int(acceptance.num_accepted[at]) + 1:
                want = states("llama", text)
                got = output.aux_hidden_states["entering:1"][path]
                assert torch.allclose(got, want["entering:1"][-len(path) :], atol=2e-4)
                self.observed += 1


@pytest.mark.parametrize("chunk", [7, 2048])
def test_drafters_get_the_states_of_prompt_and_every_step(chunk: int) -> None:
    lengths = (5, 17, 40)
    prompts = [models.prompt(length) for length in lengths]
    texts = [
        [*prompt, *models.greedy_text("llama", length, 12)] for prompt, length in zip(prompts, lengths, strict=True)
    ]
    listener = Listener(texts, 0.8, 96, num_draft_tokens=5)
    engine = Engine(models.target("llama"), listener, prefill_chunk=chunk)
    handles = engine.generate(prompts, SamplingParams(temperature=0, max_new_tokens=12))
    assert [[*prompt, *handle.tokens] for prompt, handle in zip(prompts, handles, strict=True)] == texts
    assert listener.observed > 6
