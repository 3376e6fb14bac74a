"""Hidden states for training equal those of the engine."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from oracles import models
from oracles.tiny_architectures import tiny_architecture

from specdec_fast.targets.tiny_models import tiny_model
from specdec_fast.train.heads.trainer import TargetStates


def test_states_equal_the_auxiliary_hidden_states_of_the_engine() -> None:
    places = ("entering:0", "entering:1", "final_norm")
    target = models.target("llama", max_rows=1)
    tokens = torch.tensor(models.prompt(17))
    offsets, rows = torch.tensor([0, 17], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    target.cache.reserve(0, 17)
    want = target.extend(rows, tokens, offsets, logits=False, aux_hidden_states=places).aux_hidden_states
    found = TargetStates(models.own("llama"), places)(tokens[None])
    for place in places:
        torch.testing.assert_close(found[place][0], want[place], rtol=1e-4, atol=1e-5)
    with pytest.raises(
        ValueError, match="auxiliary hidden state: got 'entering:9'; expected 'final_norm' or 'entering:i' with i <"
    ):
        TargetStates(models.own("llama"), ("entering:9",))


@pytest.mark.parametrize("kind", ["gemma3", "cohere", "granite", "gemma2", "opt"])
def test_layers_and_logits_are_those_of_the_text_model(kind: str) -> None:
    """Also beside a vision tower as deep as the text model, and where logits are scaled or capped."""
    model = tiny_architecture(kind, logits_scaling=8.0)
    own = model.config._attn_implementation
    with torch.no_grad():
        output = model(torch.tensor([models.prompt(12)]), use_cache=False, output_hidden_states=True)
    states = TargetStates(model, ("entering:1", "final_norm"))
    assert model.config._attn_implementation == own
    found = states(torch.tensor([models.prompt(12)]))
    torch.testing.assert_close(found["entering:1"], output.hidden_states[1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(states.lm_head(found["final_norm"]), output.logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["qwen3_next", "bamba", "mamba", "lfm2", "zamba2"])
def test_layers_and_logits_of_hybrid_models(family: str) -> None:
    """Layers with a recurrence count too, and the functions of their Python module are transformers' own again."""
    model, tokens = tiny_model(family), torch.tensor([models.prompt(12, 90)])
    entering: list[torch.Tensor] = []
    layer: Any = model.base_model.layers[1]  # Mamba's own hidden states begin behind the first layer
    hook = layer.register_forward_pre_hook(lambda _module, args: entering.append(args[0]))
    functions = dict(vars(sys.modules[type(model).__module__]))
    with torch.no_grad():
        want = model(tokens, use_cache=False)
    hook.remove()
    states = TargetStates(model, ("entering:1", "final_norm"))
    assert vars(sys.modules[type(model).__module__]) == functions
    found = states(tokens)
    torch.testing.assert_close(found["entering:1"], entering[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(states.lm_head(found["final_norm"]), want.logits, rtol=1e-4, atol=1e-4)


def test_models_that_no_target_serves_or_without_a_usable_projection_are_refused() -> None:
    with pytest.raises(ValueError, match="BloomForCausalLM: does not support transformers' attention interface"):
        TargetStates(tiny_architecture("bloom"), ("final_norm",))
    with pytest.raises(ValueError, match="BertLMHeadModel: its logits are no scaled or capped outputs"):
        TargetStates(tiny_architecture("bert"), ("final_norm",)).lm_head(torch.zeros(1, 64))
