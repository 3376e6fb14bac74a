"""Chunked attention: texts, trees and bits at the borders of chunks, and positions that modules count."""

from __future__ import annotations

import copy
import random
from functools import cache, partial
from typing import Any

import pytest
import torch
from oracles import models
from oracles.hybrid_models import path_to, random_tree
from oracles.noisy_oracle import NoisyChain, NoisyTree
from oracles.plain_decoding import plain_decode, recompute

from specdec_fast import Engine, HuggingFaceTarget, SamplingParams, get_drafter
from specdec_fast.core.draft import Draft
from specdec_fast.interfaces import Slots
from specdec_fast.targets.chunked_attention import ancestors_and_depth_of_chunks
from specdec_fast.targets.model_support import UnsupportedModelError
from specdec_fast.targets.tiny_models import LONG_TEXT_FAMILIES, tiny_model
from specdec_kernels import tree_attention, use_backend

CHUNK, NEW = 24, 40
LENGTHS = (5, 23, 24, 25, 47, 75)
PROMPTS = [models.prompt(length) for length in LENGTHS]


@cache
def untouched(name: str) -> Any:
    model = tiny_model(name)
    model.generation_config.eos_token_id = None
    return model


def target(name: str, **shape: Any) -> HuggingFaceTarget:
    return HuggingFaceTarget(copy.deepcopy(untouched(name)), **{"max_rows": 4, "max_length": 160, **shape})


def params(temperature: float) -> list[SamplingParams]:
    return [
        SamplingParams(temperature=temperature, seed=at, max_new_tokens=NEW, ignore_eos=True)
        for at in range(len(LENGTHS))
    ]


@cache
def expected(name: str, temperature: float) -> list[list[int]]:
    """Plain decoding by transformers' own passes over whole texts."""
    logits_after = recompute(untouched(name))
    return [plain_decode(logits_after, prompt, given) for prompt, given in zip(PROMPTS, params(temperature))]


def own_logits(name: str, text: list[int]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = untouched(name)(torch.tensor([text]), use_cache=False).logits[0]
    return found


def test_the_model_has_what_is_tested() -> None:
    """Chunked layers with and without experts, one layer without positions, whose queries are scaled by theirs."""
    config = untouched("llama4").config
    assert config.layer_types == ["chunked_attention"] * 3 + ["full_attention"]
    assert config.attn_temperature_tuning and config.attention_chunk_size == CHUNK
    experts = untouched("llama4_experts").config
    assert experts.moe_layers == [1, 3] and untouched("llama4").config.moe_layers == []
    changed = copy.deepcopy(untouched("llama4"))
    for layer in changed.model.layers:
        layer.self_attn.attn_temperature_tuning = False
    text = models.prompt(75)
    with torch.no_grad():
        unscaled = changed(torch.tensor([text]), use_cache=False).logits[0]
    assert float((own_logits("llama4", text) - unscaled).abs().amax(1)[7:].min()) > 0.01


@pytest.mark.parametrize("name", ["llama4", "llama4_experts"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_are_those_of_transformers_beyond_several_chunks(name: str, temperature: float) -> None:
    wanted = expected(name, temperature)
    texts = [[*prompt, *text] for prompt, text in zip(PROMPTS, wanted)]
    large = target(name)
    assert large.chunks == [CHUNK, CHUNK, CHUNK, 0] and large.windows is None
    for drafter in (None, NoisyChain(texts, 0.7, 96), NoisyTree(texts, 0.7, 96)):
        engine = Engine(large, drafter, rule="replay", prefill_chunk=31)
        found = [list(each.tokens) for each in engine.generate(PROMPTS, params(temperature))]
        assert found == wanted
        assert drafter is None or engine.stats.tau > 1.5


def test_preempted_requests_start_again() -> None:
    wanted = expected("llama4", 1.0)
    texts = [[*prompt, *text] for prompt, text in zip(PROMPTS, wanted)]
    engine = Engine(target("llama4", page_size=4, num_pages=45), NoisyTree(texts, 0.7, 96), rule="replay")
    handles = engine.generate(PROMPTS, params(1.0))
    assert [list(each.tokens) for each in handles] == wanted
    assert sum(each.stats.preemptions for each in handles) > 0


@pytest.mark.parametrize("drafter", ["draft_model", "layer_skip"])
def test_drafters_with_chunks(drafter: str) -> None:
    large = target("llama4")
    if drafter == "draft_model":
        own = get_drafter(drafter)(target("llama4"), num_draft_tokens=4)
    else:
        own = get_drafter(drafter)(large, skip_attention=[], skip_mlp=[], num_draft_tokens=4)
    engine = Engine(large, own, rule="replay")
    found = [list(each.tokens) for each in engine.generate(PROMPTS, params(1.0))]
    assert found == expected("llama4", 1.0) and engine.stats.alpha > 0.95


def test_graph_steps_have_chunks_too() -> None:
    large, small = (target("llama4", max_rows=8) for _ in range(2))
    engine = Engine(large, get_drafter("draft_model")(small), rule="replay", step_mode="graph")
    found = [list(each.tokens) for each in engine.generate(PROMPTS, params(1.0))]
    assert found == expected("llama4", 1.0)
    assert engine.step_mode == "graph" and engine._failures.last is None


def test_compiled_passes_have_chunks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    wanted = expected("llama4", 0.0)
    texts = [[*prompt, *text] for prompt, text in zip(PROMPTS, wanted)]
    engine = Engine(target("llama4", compile=True), NoisyTree(texts, 0.7, 96), rule="replay")
    assert [list(each.tokens) for each in engine.generate(PROMPTS, params(0.0))] == wanted
    torch._dynamo.reset()


@pytest.mark.parametrize("length", [1, 22, 23, 24, 30, 46, 47, 48])
@pytest.mark.parametrize("page_size", [1, 16])
def test_every_node_of_a_tree_has_the_bits_of_a_text_without_branches(length: int, page_size: int) -> None:
    """Trees in front of a border of chunks, across it and behind it, after a prompt in one pass or token by token."""
    large = target("llama4", max_rows=2, page_size=page_size)
    source, prompt = random.Random(length), models.prompt(length)
    tokens, parents = random_tree(source, 12)
    rows = torch.tensor([0], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)

    def extend(row: torch.Tensor, text: list[int]) -> torch.Tensor:
        bounds = torch.tensor([0, len(text)], dtype=torch.int32)
        found = large.extend(row, torch.tensor(text), bounds, logits=True).logits
        assert found is not None
        return found[0]

    assert large.cache.reserve(0, 100) and large.cache.reserve(1, 100)
    extend(rows[0], prompt)
    draft = Draft.trees([0], [(tokens, parents)])
    logits = large.score(draft, draft.get_plan())[0].logits
    assert logits is not None
    for node in range(len(tokens)):
        path = [tokens[at] for at in path_to(parents, node)]
        large.cache.set_lengths([1], [0])
        alone = [extend(rows[1], [token]) for token in [*prompt, *path]][-1]
        assert torch.equal(logits[node], alone), (node, parents)
        torch.testing.assert_close(alone, own_logits("llama4", [*prompt, *path])[-1], atol=2e-4, rtol=1e-4)


def test_a_chain_of_many_words_crosses_chunks() -> None:
    """100 nodes in one pass, four chunks and four words of ancestors, beside another request."""
    large, text, other = target("llama4"), models.prompt(110), models.prompt(30)
    for row, each in ((0, text), (1, other)):
        assert large.cache.reserve(row, len(each))
    draft = Draft.chains([0, 1], [text, other])
    logits = large.score(draft, draft.get_plan())[0].logits
    assert logits is not None
    torch.testing.assert_close(logits[:110], own_logits("llama4", text), atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(logits[110:], own_logits("llama4", other), atol=2e-4, rtol=1e-4)


def packed_slots(source: random.Random, chains: bool) -> tuple[Slots, list[int], list[list[int]]]:
    """Places of random trees in three rows, their lengths, and the nodes that each node sees: ancestors and itself."""
    lengths = [source.randrange(0, 40) for _ in range(3)]
    trees = [random_tree(source, 40, 1 if chains else 3)[1] for _ in lengths]
    draft = Draft.trees([0, 1, 2], [([1] * len(parents), parents) for parents in trees])
    plan, committed = draft.get_plan(), torch.tensor(lengths, dtype=torch.int32)
    row = torch.searchsorted(draft.offsets, torch.arange(draft.num_nodes, dtype=torch.int32), right=True) - 1
    places = torch.arange(draft.num_nodes) - draft.offsets[row].long()
    table = torch.arange(1, 3 * 80 + 1, dtype=torch.int32).view(3, 80)
    slots = table[row, committed[row].long() + places].long()
    tree = (None, None) if chains else (plan.ancestors, plan.depth)
    at = Slots(table, committed, draft.offsets, slots, (committed[row] + plan.depth).long(), *tree)
    return at, lengths, [path_to(parents, node) for parents in trees for node in range(len(parents))]


@pytest.mark.parametrize("chains", [False, True])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_the_operator_sees_chunks(backend: str, chains: bool) -> None:
    """Attention of random trees against one softmax over the keys of the own chunk."""
    source = random.Random(int(chains))
    torch.manual_seed(1)
    for chunk in (1, 3, 8, 24, 100):
        at, lengths, paths = packed_slots(source, chains)
        count = len(paths)
        keys, values = torch.randn(2, 241, 1, 2, 16)
        query = torch.randn(count, 4, 16)
        ancestors, depth = ancestors_and_depth_of_chunks(at, chunk)
        tree = at.page_table, at.lengths, at.offsets, ancestors, depth
        with use_backend(tree_attention=backend):
            found = tree_attention(query, keys, values, *tree, scale=0.25, window=chunk)
        bounds = at.offsets.tolist()
        for node, path in enumerate(paths):
            row = next(row for row in range(3) if node < bounds[row + 1])
            position = lengths[row] + len(path) - 1
            table = at.page_table[row]
            seen = [table[slot] for slot in range(lengths[row]) if slot // chunk == position // chunk]
            seen += [
                table[lengths[row] + other]
                for place, other in enumerate(path)
                if (lengths[row] + place) // chunk == position // chunk
            ]
            index = torch.stack(seen).long()
            key, value = (part[index, 0].repeat_interleave(2, 1) for part in (keys, values))
            weights = torch.einsum("hd,lhd->hl", query[node] * 0.25, key).softmax(1)
            torch.testing.assert_close(found[node], torch.einsum("hl,lhd->hd", weights, value), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("chunk", [1, 2, 5, 255, 256, 300, 511])
def test_chunks_of_a_mask_are_found(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check reads 4 tokens, whatever the chunk."""
    from transformers.masking_utils import create_causal_mask as make
    from transformers.models.llama import modeling_llama

    def rule(_: Any, __: Any, query: Any, key: Any) -> Any:
        return query // chunk == key // chunk

    monkeypatch.setattr(modeling_llama, "create_causal_mask", lambda **given: make(**given, and_mask_function=rule))
    found = HuggingFaceTarget(models.own("llama"), max_rows=1, max_length=512)
    assert found.chunks == (None if chunk == 1 else [chunk] * 2) and found.windows == ([1] * 2 if chunk == 1 else None)


def test_a_chunk_that_no_text_exceeds_is_none() -> None:
    assert target("llama4", max_length=CHUNK).chunks is None


def test_modules_that_count_are_given_back() -> None:
    model, text = copy.deepcopy(untouched("llama4")), models.prompt(75)
    first, second = (HuggingFaceTarget(model, max_rows=1, max_length=64) for _ in range(2))
    first.close()
    assert second.cache.reserve(0, 40)
    draft = Draft.chains([0], [text[:40]])
    logits = second.score(draft, draft.get_plan())[0].logits
    assert logits is not None
    torch.testing.assert_close(logits, own_logits("llama4", text[:40]), atol=2e-4, rtol=1e-4)
    second.close()
    assert not any(module._forward_pre_hooks for module in model.modules())
    with torch.no_grad():
        assert torch.equal(model(torch.tensor([text]), use_cache=False).logits[0], own_logits("llama4", text))


def test_modules_that_count_and_get_no_positions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec_fast.targets.huggingface.count_by_position", lambda _: lambda: None)
    with pytest.raises(UnsupportedModelError, match="differ from the model's own by"):
        target("llama4")
    assert set(LONG_TEXT_FAMILIES) >= {"llama4", "llama4_experts"}
