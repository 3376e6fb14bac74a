"""Rotary frequencies pinned per request: texts equal those of transformers with one set of frequencies."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
from oracles import models
from oracles.noisy_oracle import NoisyChain, NoisyTree
from oracles.plain_decoding import plain_decode, recompute
from oracles.scaled_rotary import KINDS, LIMIT, SWITCH, fixed_model, own_logits, scaled_model, side_of

from specdec_fast import Engine, HuggingFaceTarget, SamplingParams, get_drafter
from specdec_fast.core.draft import Draft
from specdec_fast.targets.rotary_pinning import rotary_kinds
from specdec_fast.targets.tiny_models import tiny_model

REQUESTS = ((5, 20), (17, 23), (17, 24), (30, 40), (75, 30), (3, 120))
"""Lengths of prompts and texts: two end exactly at the switch or before it, the others may cross it or begin behind."""


def params(temperature: float) -> list[SamplingParams]:
    return [
        SamplingParams(temperature=temperature, seed=at, max_new_tokens=new, ignore_eos=True)
        for at, (_, new) in enumerate(REQUESTS)
    ]


PROMPTS = [models.prompt(length) for length, _ in REQUESTS]


@cache
def expected(kind: str, temperature: float) -> list[list[int]]:
    """Plain decoding without cache, each request with the frequencies of its own side."""
    return [
        plain_decode(recompute(fixed_model(kind, side_of(length + new))), prompt, given)
        for (length, new), prompt, given in zip(REQUESTS, PROMPTS, params(temperature))
    ]


def found(engine: Engine, temperature: float) -> list[list[int]]:
    return [list(each.tokens) for each in engine.generate(PROMPTS, params(temperature))]


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_the_two_sides_differ(kind: str) -> None:
    """Otherwise the tests below would say nothing."""
    short, long = (own_logits(kind, side, PROMPTS[1]) for side in ("short", "long"))
    assert float((short - long).abs().amax(1)[3:].min()) > 0.05


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_depend_on_their_own_length_alone(kind: str, temperature: float) -> None:
    """Ragged batches of both sides, with chains and trees of which some tokens are rejected, in small pieces."""
    wanted = expected(kind, temperature)
    texts = [[*prompt, *text] for prompt, text in zip(PROMPTS, wanted)]
    target = HuggingFaceTarget(scaled_model(kind), max_rows=4, max_length=LIMIT)
    assert target.max_length == target.context_limit == LIMIT
    for drafter in (None, NoisyChain(texts, 0.7, 96), NoisyTree(texts, 0.7, 96)):
        engine = Engine(target, drafter, rule="replay", prefill_chunk=7)
        assert found(engine, temperature) == wanted
        assert drafter is None or engine.stats.tau > 1.5
    target.close()


def test_preempted_requests_keep_their_frequencies(kind: str) -> None:
    wanted = expected(kind, 1.0)
    texts = [[*prompt, *text] for prompt, text in zip(PROMPTS, wanted)]
    target = HuggingFaceTarget(scaled_model(kind), max_rows=6, max_length=LIMIT, page_size=4, num_pages=50)
    engine = Engine(target, NoisyTree(texts, 0.7, 96), rule="replay")
    handles = engine.generate(PROMPTS, params(1.0))
    assert [list(each.tokens) for each in handles] == wanted
    assert sum(each.stats.preemptions for each in handles) > 0
    target.close()


@pytest.mark.parametrize("drafter", ["draft_model", "draft_tree", "layer_skip"])
@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_drafters_with_the_same_scaling(kind: str, drafter: str) -> None:
    """A copy of the model as the draft: its tokens are accepted on both sides, so it has the target's frequencies."""
    target = HuggingFaceTarget(scaled_model(kind), max_rows=3, max_length=LIMIT)
    options: dict[str, Any] = {"num_draft_tokens": 4}
    if drafter == "layer_skip":
        own = get_drafter(drafter)(target, skip_attention=[], skip_mlp=[], **options)
    else:
        small = HuggingFaceTarget(scaled_model(kind), max_rows=3, max_length=LIMIT)
        own = get_drafter(drafter)(small, **options)
    engine = Engine(target, own, rule="replay")
    assert found(engine, 1.0) == expected(kind, 1.0)
    assert engine.stats.alpha > 0.95


def test_texts_on_one_side_are_those_of_generate() -> None:
    """transformers changes sides by the present length, so it agrees where that never crosses the switch."""
    own = scaled_model("phi3")
    for length, new in ((17, 23), (75, 30)):
        tokens = torch.tensor([models.prompt(length)])
        mask = torch.ones_like(tokens)
        text = own.generate(tokens, attention_mask=mask, do_sample=False, max_new_tokens=new, pad_token_id=0)
        with Engine(HuggingFaceTarget(own, max_length=LIMIT)) as engine:
            given = SamplingParams(temperature=0, max_new_tokens=new, ignore_eos=True)
            (handle,) = engine.generate([models.prompt(length)], given)
        assert list(handle.tokens) == text[0, length:].tolist()


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_beginnings_are_shared_on_one_side_only(kind: str) -> None:
    """The same prompt for a short and for a long text, each twice."""
    target = HuggingFaceTarget(scaled_model(kind), max_rows=1, max_length=LIMIT, page_size=4)
    small = HuggingFaceTarget(scaled_model(kind), max_rows=1, max_length=LIMIT, page_size=4)
    engine, prompt = Engine(target, get_drafter("draft_model")(small), rule="replay"), models.prompt(21)
    for new, cached in ((19, 0), (20, 0), (19, 20), (20, 20)):
        given = SamplingParams(temperature=1, seed=5, max_new_tokens=new, ignore_eos=True)
        (handle,) = engine.generate([prompt], given)
        wanted = plain_decode(recompute(fixed_model(kind, side_of(21 + new))), prompt, given)
        assert (list(handle.tokens), handle.stats.cached_tokens) == (wanted, cached)
    assert engine.stats.alpha > 0.95


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_graph_steps_pin_too(kind: str) -> None:
    target = HuggingFaceTarget(scaled_model(kind), max_rows=8, max_length=LIMIT)
    small = HuggingFaceTarget(scaled_model(kind), max_rows=8, max_length=LIMIT)
    engine = Engine(target, get_drafter("draft_model")(small), rule="replay", step_mode="graph")
    assert found(engine, 1.0) == expected(kind, 1.0)
    assert engine.step_mode == "graph" and engine.stats.alpha > 0.95


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_compiled_passes_pin_too(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    target = HuggingFaceTarget(scaled_model(kind), max_rows=3, max_length=LIMIT, compile=True)
    texts = [[*prompt, *text] for prompt, text in zip(PROMPTS, expected(kind, 0.0))]
    engine = Engine(target, NoisyTree(texts, 0.7, 96), rule="replay")
    assert found(engine, 0.0) == expected(kind, 0.0)
    torch._dynamo.reset()


@pytest.mark.parametrize("max_length", [SWITCH, LIMIT])
def test_pinned_passes_are_not_fused(max_length: int) -> None:
    target = HuggingFaceTarget(scaled_model("longrope"), max_length=max_length, fused_forward=None)
    assert target.fused_forward is None and "rotary_emb has a forward of its own" in str(target.why_not_fused)


@pytest.mark.parametrize("kind", KINDS)
def test_nodes_of_both_sides_share_a_pass(kind: str) -> None:
    """Logits of a tree in a row that is pinned to a short text, beside one that nobody began."""
    target = HuggingFaceTarget(scaled_model(kind), max_rows=2, max_length=LIMIT)
    target.begin_row(0, SWITCH)
    text, parents = models.prompt(17), [*range(-1, 16)]
    for row in (0, 1):
        assert target.cache.reserve(row, 30)
    draft = Draft.trees([0, 1], [([*text, 5], [*parents, 9])] * 2)
    logits = target.score(draft, draft.get_plan())[0].logits
    assert logits is not None
    for at, side in enumerate(("short", "long")):
        own = logits[18 * at : 18 * at + 18]
        torch.testing.assert_close(own[:17], own_logits(kind, side, text), atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(own[17], own_logits(kind, side, [*text[:10], 5])[-1], atol=2e-4, rtol=1e-4)


def test_targets_of_different_lengths_share_a_model() -> None:
    """The base of `dynamic` follows the length of the target whose pass runs. The last one gives the modules back."""
    model, text = scaled_model("dynamic"), models.prompt(60)
    logits = []
    targets = [HuggingFaceTarget(model, max_rows=1, max_length=length) for length in (LIMIT, 64, SWITCH)]
    assert [target.prefix_kind(60) for target in targets] == ["longer than 40", "longer than 40", ""]
    for target in targets[:2]:
        assert target.cache.reserve(0, 60)
        draft = Draft.chains([0], [text])
        logits.append(target.score(draft, draft.get_plan())[0].logits)
    torch.testing.assert_close(logits[0], own_logits("dynamic", "long", text), atol=2e-4, rtol=1e-4)
    assert not torch.allclose(logits[0], logits[1], atol=0.05)
    rotary = model.model.rotary_emb
    for target in targets:
        assert "forward" in vars(rotary)
        target.close()
    assert "forward" not in vars(rotary) and rotary_kinds(rotary) == {None: "dynamic"}
    with torch.no_grad():
        untouched = scaled_model("dynamic")
        untouched(torch.tensor([text[:5]]), use_cache=False)  # its frequencies follow what it has read before
        wanted = untouched(torch.tensor([text]), use_cache=False).logits
        assert torch.equal(model(torch.tensor([text]), use_cache=False).logits, wanted)


def test_scaling_by_type_of_layer() -> None:
    """Gemma 3 has frequencies for each type of layer; one of them is scaled by the text."""
    rope = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0},
    }
    model = tiny_model("gemma3", max_position_embeddings=SWITCH, rope_parameters=rope)
    rotary, text = model.model.rotary_emb, models.prompt(30)
    assert rotary_kinds(rotary) == {"full_attention": "dynamic"}
    with torch.no_grad():
        want = model(torch.tensor([text]), use_cache=False).logits[0]
    target = HuggingFaceTarget(model, max_rows=2, max_length=2 * SWITCH)
    assert target.context_limit == 2 * SWITCH
    target.begin_row(0, 30)
    for row in (0, 1):
        assert target.cache.reserve(row, 30)
    draft = Draft.chains([0, 1], [text, text])
    logits = target.score(draft, draft.get_plan())[0].logits
    assert logits is not None
    torch.testing.assert_close(logits[:30], want, atol=2e-4, rtol=1e-4)
    assert not torch.allclose(logits[30:], want, atol=0.05)
