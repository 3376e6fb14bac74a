"""Draft logits of NaN count as one fault of their request, whichever drafter and path computed them, and are named."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import heads, models
from oracles.automaton import AutomatonTarget, mixing, random_logits

from specdec_fast import Engine, HuggingFaceTarget, SamplingParams, get_drafter
from specdec_fast.core.finite_logits import require_finite_logits
from specdec_fast.drafters import make_drafter
from specdec_fast.trees import expansion

VOCAB, STATES = 8, 23
POISON = VOCAB - 1  # after this token a poisoned model returns NaN
GREEDY = SamplingParams(temperature=0, max_new_tokens=14)
TREES: dict[str, tuple[str, dict[str, Any]]] = {
    "static, top_k": ("draft_tree", {"how": "top_k"}),
    "static, coupled": ("draft_tree", {"how": "coupled"}),
    "static, hybrid": ("draft_tree", {"how": "hybrid"}),
    "dynamic": ("draft_tree", {"how": "top_k", "depth": 3, "width": 2}),
    "layer_skip": ("layer_skip", {"exit_after": 1, "stop": "fixed"}),
    "layer_skip, adaptive": ("layer_skip", {"exit_after": 1, "pick": "greedy"}),
}


def automaton(poison: bool = False) -> AutomatonTarget:
    logits, transitions = random_logits(STATES, VOCAB, seed=2), mixing(STATES, VOCAB)
    logits[:, POISON] = -20.0
    if poison:
        logits = torch.cat([logits, torch.full((1, VOCAB), float("nan"))])
        transitions = torch.cat([transitions, torch.full((1, VOCAB), STATES)])
        transitions[:, POISON] = STATES
    return AutomatonTarget(logits, transitions)


def rule_of(options: dict[str, Any]) -> dict[str, Any]:
    return {"rule": "recursive_rejection"} if options.get("how") == "hybrid" else {}


@pytest.mark.parametrize("kind", TREES)
def test_nan_at_the_root_is_a_fault_of_that_request_alone(kind: str, faults: list[str]) -> None:
    name, options = TREES[kind]
    prompts = [[1], [1, POISON, 2], [1, 2, 3]]
    want = [handle.tokens for handle in Engine(automaton()).generate(prompts, GREEDY)]
    drafter = get_drafter(name)(automaton(poison=True), **options)
    handles = Engine(automaton(), drafter, **rule_of(options)).generate(prompts, GREEDY)
    assert [handle.tokens for handle in handles] == want and [handle.error for handle in handles] == [None] * 3
    assert [handle.stats.faults for handle in handles] == [0, 1, 0]
    assert handles[1].stats.num_draft_tokens == 0 < min(handle.stats.num_draft_tokens for handle in handles[::2])
    assert len(faults) == 1 and f"drafter {name} raised in propose: ValueError: {name}: got logits that" in faults[0]


@pytest.mark.parametrize("kind", TREES)
def test_nan_below_the_root_is_a_fault_too(kind: str, faults: list[str]) -> None:
    name, options = TREES[kind]
    want = Engine(automaton()).generate([[1]], GREEDY)[0].tokens
    model = automaton()
    model.table[model.state_after([1, want[0]])] = float("nan")
    handle = Engine(automaton(), get_drafter(name)(model, **options), **rule_of(options)).generate([[1]], GREEDY)[0]
    assert handle.tokens == want and handle.stats.faults == 1 and "logits that are not finite" in faults[0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("pick", ["coupled", "sampled", "greedy"])
def test_nan_in_a_chain_of_a_draft_model(pick: str, fused: bool, temperature: float, faults: list[str]) -> None:
    """The draft's embedding of one token is NaN: only the request that has the token fails to draft."""
    model = models.own("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[95] = float("nan")
    draft = HuggingFaceTarget(model, max_length=64, fused_forward=fused)
    engine = Engine(models.target("llama"), get_drafter("draft_model")(draft, pick=pick), rule="replay")
    prompts = [models.prompt(5), [5, 95, 7], models.prompt(3)]
    params = SamplingParams(temperature=temperature, seed=1, max_new_tokens=12)
    want = Engine(models.target("llama")).generate(prompts, params)
    handles = engine.generate(prompts, params)
    assert [handle.tokens for handle in handles] == [handle.tokens for handle in want]
    assert [handle.stats.faults for handle in handles] == [0, 1, 0]
    assert len(faults) == 1 and "draft_model: got logits that are not finite, in float32" in faults[0]


@pytest.mark.parametrize("pick", ["coupled", "greedy"])
def test_a_draft_model_of_nan_is_counted_in_cuda_graph_steps(pick: str, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing reads the logits there, so the chains end before NaN, and the engine counts drafts without tokens."""
    caplog.set_level(logging.WARNING, "specdec_fast")
    target, model = models.target("llama"), models.own("llama")
    with torch.no_grad():
        model.get_output_embeddings().weight[3] = float("nan")
    draft = HuggingFaceTarget(model, max_length=320)
    engine = Engine(target, get_drafter("draft_model")(draft, pick=pick), step_mode="graph")
    handle = engine.generate([models.prompt(5)], SamplingParams(temperature=0, max_new_tokens=20))[0]
    assert handle.tokens == models.greedy_text("llama", 5, 20)
    assert (handle.stats.faults, handle.stats.num_draft_tokens) == (1, 0) and "drafted nothing" in caplog.text


@pytest.mark.parametrize("name", ["eagle", "draft_tree"])
@pytest.mark.parametrize("depth", [0, 2])
def test_trees_of_a_device_that_the_host_waits_for(
    name: str, depth: int, tmp_path: Path, faults: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There only roots without a draft are read."""
    monkeypatch.setattr(expansion, "host_reads_are_free", lambda device: False)
    target, options = models.target("llama"), {"depth": depth} if depth else {}
    drafter: Any
    if name == "draft_tree":
        model = models.own("llama")
        with torch.no_grad():
            model.get_input_embeddings().weight.fill_(float("nan"))
        drafter = get_drafter(name)(HuggingFaceTarget(model, max_length=320), how="top_k", **options)
    else:
        drafter = make_drafter(name, {**heads.options(name, tmp_path), **options}, target=target)
        with torch.no_grad():
            drafter.model.head.get_parameter("layers.0.mlp.up_proj.weight").fill_(float("nan"))
    handle = Engine(target, drafter).generate([models.prompt(5)], SamplingParams(temperature=0, max_new_tokens=20))[0]
    assert handle.tokens == models.greedy_text("llama", 5, 20)
    assert handle.stats.faults == 1 and f"{name}: got logits that are not finite" in faults[0]


def test_parallel_heads_that_become_nan(faults: list[str]) -> None:
    """On a CPU every proposal is checked, not the first alone."""
    target = models.target("llama")
    made: Any = get_drafter("medusa")(target, models.medusa_heads(target))
    engine = Engine(target, made)
    handle = engine.submit(models.prompt(17), SamplingParams(temperature=0, max_new_tokens=20))
    engine.step()
    engine.step()
    assert handle.stats.num_draft_tokens > 0 and not faults
    with torch.no_grad():
        made.heads.weight.fill_(float("nan"))
    while not engine.idle:
        engine.step()
    assert handle.tokens == models.greedy_text("llama", 17, 20)
    assert handle.stats.faults == 1 and "medusa: got logits that are not finite" in faults[0]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_one_number_spoils_a_row(value: float) -> None:
    logits = torch.zeros(2, 5)
    require_finite_logits("any", logits)
    logits[0] = float("-inf")
    logits[0, 2] = 1.0  # masked tokens are no fault
    require_finite_logits("any", logits)
    logits[1, 4] = value
    with pytest.raises(ValueError, match="any: got logits that are not finite, in float32; expected"):
        require_finite_logits("any", logits)
    with pytest.raises(ValueError, match="not finite"):
        require_finite_logits("any", torch.full((1, 3), float("-inf")))
