"""torch.compile together with auxiliary hidden states and with plans of attention: neither switches the other off."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from oracles import heads, models
from torch import Tensor

from specdec_fast import Engine, HuggingFaceTarget, SamplingParams, get_drafter
from specdec_fast.core.draft import Draft
from specdec_kernels import tree_attention, tree_plan, use_backend
from specdec_kernels.dispatch import extension, torch_ops

AUX_HIDDEN_STATES = ("entering:0", "entering:1", "final_norm")
DRAFTS = [
    Draft.chains([0], [[1, 2, 3]]),
    Draft.trees([0], [([1, 2, 3], [-1, 0, 0])]),
    Draft.chains([0], [[1, 2, 3, 4, 5]]),
    Draft.chains([0], [[1, 2]]),
]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Runs of compiled programs, by the program; capture and guards without a code generator."""
    made: list[Any] = []

    def keep(module: Any, _inputs: Any, **_options: Any) -> Any:
        program = SimpleNamespace(module=module, runs=0)
        made.append(program)

        def run(*args: Any) -> Any:
            program.runs += 1
            return module(*args)

        return run

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=keep))
    yield made
    torch._dynamo.reset()


def test_passes_with_aux_hidden_states_run_compiled_code(graphs: list[Any]) -> None:
    eager = HuggingFaceTarget(models.own("llama"), max_length=64)
    ready = HuggingFaceTarget(models.own("llama"), max_length=64, compile=True)
    assert eager.cache.reserve(0, 16) and ready.cache.reserve(0, 16)
    for aux_hidden_states in (AUX_HIDDEN_STATES, (), AUX_HIDDEN_STATES):
        for draft in DRAFTS:
            plan, before = tree_plan(draft.parents, draft.offsets), sum(each.runs for each in graphs)
            (want, _), (got, _) = (
                eager.score(draft, plan, aux_hidden_states),
                ready.score(draft, plan, aux_hidden_states),
            )
            assert sum(each.runs for each in graphs) == before + 1, "one whole graph a pass"
            torch.testing.assert_close(got.logits, want.logits)
            assert got.aux_hidden_states.keys() == want.aux_hidden_states.keys() == set(aux_hidden_states)
            for name in aux_hidden_states:
                torch.testing.assert_close(got.aux_hidden_states[name], want.aux_hidden_states[name])
    assert len(graphs) <= 2 * 3, "compiled again for every shape"
    assert not ready.model.base_model._forward_hooks, "a auxiliary hidden state was left behind"
    assert not any(layer._forward_pre_hooks for layer in ready.layers)


def test_a_compiled_target_of_eagle_gives_the_same_text(graphs: list[Any], tmp_path: Any) -> None:
    wanted = [SamplingParams(temperature=t, seed=7, max_new_tokens=12) for t in (0.0, 1.0)]
    prompts = [models.prompt(5), models.prompt(17)]
    made = []
    for ready in (False, True):
        target = HuggingFaceTarget(models.own("llama"), max_length=64, max_rows=2, compile=ready)
        drafter = get_drafter("eagle")(target, **heads.options("eagle", tmp_path))
        made.append([handle.tokens for handle in Engine(target, drafter).generate(prompts, wanted)])
        assert bool(graphs) == ready
    assert made[0] == made[1]
    assert len(graphs) <= 6 and sum(each.runs for each in graphs) >= 4


def test_partial_passes_are_not_compiled(graphs: list[Any]) -> None:
    from specdec_fast.targets.skipped_layers import SkippedLayers

    target = HuggingFaceTarget(models.own("llama"), max_length=64, compile=True)
    assert target.cache.reserve(0, 16)
    plan = tree_plan(DRAFTS[0].parents, DRAFTS[0].offsets)
    with target.skip_layers(SkippedLayers(attention=(1,), mlp=())):
        target.score(DRAFTS[0], plan, AUX_HIDDEN_STATES)
    assert graphs == []
    target.score(DRAFTS[0], plan, AUX_HIDDEN_STATES)
    assert len(graphs) == 1


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The dispatcher serves attention by launches, as on a GPU; the plan of each, which the CPU has no use for."""
    plans: list[Any] = []

    def launch(place: str) -> Any:
        def run(*args: Any, plan: Any = None, **options: Any) -> Any:
            plans.append(plan)
            with use_backend(tree_attention="sdpa"):
                return tree_attention(*args, **options)

        return run

    def plan_for(query: Tensor, keys: Tensor, *rest: Any, window: int) -> Any:
        return SimpleNamespace(nodes=query.shape[0], lengths=rest[1].tolist(), window=window)

    monkeypatch.setattr(torch_ops, "_find_launch", launch)
    monkeypatch.setattr(import_module("specdec_kernels.ops.tree_attention"), "plan_for", plan_for)
    library = torch.library.Library("specdec", "IMPL")
    library.impl("tree_attention", torch_ops.LAUNCHES["tree_attention"], "CPU", allow_override=True)
    yield plans
    library._destroy()


@pytest.mark.skipif(extension.unavailable_reason() is not None, reason=str(extension.unavailable_reason()))
@pytest.mark.parametrize("aux_hidden_states", [(), AUX_HIDDEN_STATES])
def test_the_layers_of_a_compiled_pass_share_a_plan(
    aux_hidden_states: tuple[str, ...], graphs: list[Any], planned: list[Any]
) -> None:
    target = HuggingFaceTarget(models.own("llama"), max_length=64, compile=True)
    assert target.cache.reserve(0, 16)
    planned.clear()
    for draft in (DRAFTS[0], DRAFTS[2]):
        target.score(draft, tree_plan(draft.parents, draft.offsets), aux_hidden_states)
    first, second = planned[: len(planned) // 2], planned[len(planned) // 2 :]
    assert len(first) == len(second) == target.num_layers
    assert all(plan is first[0] for plan in first) and all(plan is second[0] for plan in second)
    assert (first[0].nodes, second[0].nodes, first[0].lengths) == (3, 5, [0])


@pytest.mark.skipif(extension.unavailable_reason() is not None, reason=str(extension.unavailable_reason()))
def test_calls_outside_of_a_pass_have_no_plan(planned: list[Any]) -> None:
    target = HuggingFaceTarget(models.own("llama"), max_length=64)
    with torch_ops.share_attention_plans():
        pass
    from specdec_kernels.testing.agreement import make_sample
    from specdec_kernels.testing.samples_attention import Sizes

    call = make_sample("tree_attention", Sizes(vocab=50, length=20, width=16))
    torch.ops.specdec.tree_attention(*call.arguments, call.options["scale"], 0.0, 0, None)
    assert planned[-1] is None and target.num_layers == 2
