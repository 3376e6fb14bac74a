"""Medusa: the state a draft starts from, the head of each node, published trees, and what an oracle accepts."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import models
from oracles.automaton import AutomatonTarget, random_logits, scripted

from specdec_fast import Engine, SamplingParams, get_drafter, load
from specdec_fast.core.draft import Draft
from specdec_fast.drafters import make_drafter
from specdec_fast.drafters.medusa import published_trees
from specdec_fast.engine.state import DecodeState
from specdec_fast.heads.checkpoint_medusa import save_medusa
from specdec_fast.heads.medusa import MedusaHeads
from specdec_fast.interfaces import Budget, TargetOutput
from specdec_fast.trees.static_shape import Shape, shape_of_widths, write_shape

VOCAB = 9
CHAIN = (-1, 0, 1, 2)


def medusa(target: Any, head: Any, **options: Any) -> Any:
    return get_drafter("medusa")(target, head, **options)


def oracle_heads(target: AutomatonTarget, heads: int) -> MedusaHeads:
    """Heads for a target whose state always advances by one: head k predicts the token k + 2 ahead."""
    states = len(target.table)
    made = MedusaHeads(states, target.vocab_size, heads, num_layers=0)
    assert made.lm_head is not None
    with torch.no_grad():
        for head in range(heads):
            ahead = (torch.arange(states) + 1 + head).clamp(max=states - 1)
            made.lm_head[head] = target.table[ahead].T
    return made


def random_heads(hidden: int, vocab: int, heads: int, **options: Any) -> MedusaHeads:
    torch.manual_seed(0)
    made = MedusaHeads(hidden, vocab, heads, **options)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    return made


def script(length: int, seed: int = 0) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(VOCAB) for _ in range(length)]


@torch.inference_mode()
def drafted(drafter: Any, texts: list[list[int]], states: torch.Tensor, limits: list[int], **params: Any) -> Draft:
    """Returns the draft for texts whose tokens before the last have these states, row after row."""
    state = DecodeState(len(texts), 99)
    rows = [state.join(text, SamplingParams(seed=at, **params), len(text), ()) for at, text in enumerate(texts)]
    drafter.begin(state, rows, TargetOutput(None, {"final_norm": states}))
    draft: Draft = drafter.propose(state, rows, Budget(limits), state.rng(rows))
    draft.check(VOCAB)
    return draft


def test_an_oracle_gives_depth_plus_one_tokens_per_step() -> None:
    """Token 0 is in the script, so padding with token 0 would be detected."""
    target = scripted(script(60), VOCAB)
    drafter = medusa(target, oracle_heads(target, 3), shape=CHAIN)
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, seed=1, max_new_tokens=33)
        handle = Engine(target, drafter).generate([script(4)], params)[0]
        want = Engine(scripted(script(60), VOCAB)).generate([script(4)], params)[0]
        assert handle.tokens == want.tokens and handle.stats.steps <= (9 if temperature == 0 else 11)


def test_the_first_head_predicts_the_token_after_the_root() -> None:
    """An offset of one in either direction would draft another token of the script."""
    words = script(30)
    target = scripted(words, VOCAB)
    drafter = medusa(target, oracle_heads(target, 3), shape=CHAIN, pick="greedy")
    states = torch.eye(len(target.table))[torch.arange(1, 7)]  # of the first six tokens; the seventh is the root
    draft = drafted(drafter, [words[:7]], states, [3], temperature=0)
    assert draft.tokens.tolist() == words[6:10]


def test_nodes_take_the_rank_of_their_heads() -> None:
    heads, target = random_heads(5, VOCAB, 2), AutomatonTarget(random_logits(5, VOCAB))
    parents = (-1, 0, 1, 0, 1, 3, 0)
    drafter = medusa(target, heads, shape=parents, pick="greedy")
    states = torch.randn(7, 5)
    draft = drafted(drafter, [[1, 2, 3], [4], [1, 2, 3, 4, 5, 6]], states, [6, 6, 4], temperature=0)
    assert draft.counts == (7, 1, 5), "a text of one token has no state to start from"
    for first, state, root, count in ((0, 1, 3, 7), (8, 6, 6, 5)):
        best = heads(states[state : state + 1])[:, 0].topk(3).indices.tolist()
        want = [root, best[0][0], best[1][0], best[0][1], best[1][1], best[1][0], best[0][2]][:count]
        assert draft.tokens[first : first + count].tolist() == want
        assert draft.parents[first : first + count].tolist() == list(parents[:count])
    assert draft.plan is not None and draft.plan.depth.tolist() == [0, 1, 2, 1, 2, 2, 1, 0, 0, 1, 2, 1, 2]


def test_the_noise_of_the_target_orders_the_tokens() -> None:
    """With exact heads, replay accepts whole chains at any temperature."""
    generator = torch.Generator().manual_seed(2)
    table = torch.randn(50, VOCAB, generator=generator)
    counting = torch.arange(1, 51).clamp(max=49)[:, None].expand(50, VOCAB).contiguous()

    def tau(pick: str) -> float:
        target = AutomatonTarget(table, counting)
        drafter = medusa(target, oracle_heads(target, 3), shape=CHAIN, pick=pick)
        params = [SamplingParams(temperature=1.0, seed=seed, max_new_tokens=40) for seed in range(4)]
        handles = Engine(target, drafter).generate([[1, 2]] * 4, params)
        plain = Engine(AutomatonTarget(table, counting)).generate([[1, 2]] * 4, params)
        assert [handle.tokens for handle in handles] == [handle.tokens for handle in plain]
        return sum(handle.stats.tau for handle in handles) / 4

    assert tau("coupled") == 4.0 and tau("greedy") < 2.5


def test_a_reduced_vocabulary_drafts_its_own_tokens_only() -> None:
    heads = random_heads(5, VOCAB, 2, token_ids=3)
    assert heads.token_ids is not None
    heads.token_ids.copy_(torch.tensor([0, 4, 7]))
    for pick in ("coupled", "greedy"):
        drafter = medusa(AutomatonTarget(random_logits(5, VOCAB)), heads, pick=pick)
        draft = drafted(drafter, [[1, 2, 3]], torch.randn(2, 5), [40], temperature=1.0)
        assert draft.num_nodes == 1 + 12, "three children, and three below each"
        assert set(draft.tokens[1:].tolist()) == {0, 4, 7}


def test_siblings_differ_and_nan_logits_are_named() -> None:
    heads = random_heads(5, VOCAB, 4)
    drafter = medusa(AutomatonTarget(random_logits(5, VOCAB)), heads, num_draft_tokens=None)
    draft = drafted(drafter, [[1, 2, 3]], torch.randn(2, 5), [63])
    pairs = list(zip(draft.parents.tolist()[1:], draft.tokens.tolist()[1:], strict=True))
    assert len(set(pairs)) == len(pairs) == 59, "four of 63 nodes are at or below rank 9, and there are 9 tokens"
    with pytest.raises(ValueError, match=r"medusa: got logits that are not finite, in float32; .* bfloat16 or float32"):
        drafted(drafter, [[1, 2, 3]], torch.full((2, 5), float("nan")), [63])


def test_states_follow_the_text() -> None:
    """Every step starts from the state before the newest token, which equals a recomputation by the target."""
    target = AutomatonTarget(random_logits(7, VOCAB, seed=4))
    drafter = medusa(target, random_heads(7, VOCAB, 3))
    engine = Engine(target, drafter)
    for at in range(3):
        engine.submit(script(2 + 3 * at, at), SamplingParams(seed=at, max_new_tokens=20))
    for _ in range(6):
        engine.step()
        for row in engine._running:
            tokens = list(engine.state.tokens(row))
            length, state = drafter._states[row]
            assert length == len(tokens) and int(state.argmax()) == target.state_after(tokens[:-1])


def test_published_trees_are_those_of_the_authors() -> None:
    """Node counts by depth equal those of the published code."""
    trees = published_trees()
    assert len(trees) == 9
    counts = {
        "vicuna_7b_stage2": [10, 23, 23, 7],
        "vicuna_13b_stage2": [10, 19, 25, 9],
        "vicuna_33b_stage2": [10, 24, 24, 5],
        "zephyr_stage2": [10, 27, 23, 3],
        "mc_sim_7b_63": [10, 28, 23, 2],
    }
    for name, shape in trees.items():
        depth = [0]
        for parent in shape.parents[1:]:
            depth.append(depth[parent] + 1)
        assert shape.num_nodes == 63 and all(len(kids) <= 10 for kids in shape.children(63))
        found = Counter(depth[1:])
        assert name not in counts or [found[level] for level in range(1, 5)] == counts[name]
    assert trees["mc_sim_7b_63"].parents[:8] == (-1, 0, 1, 0, 1, 0, 2, 3)


def test_shapes_by_name_by_list_and_by_file(tmp_path: Path) -> None:
    target, heads = AutomatonTarget(random_logits(5, 40)), random_heads(5, 40, 4)
    write_shape(tmp_path / "tree.json", shape_of_widths((2, 1)), {})
    sizes = [
        medusa(target, heads, shape=shape, num_draft_tokens=None).num_draft_tokens
        for shape in ("zephyr_stage2", [-1, 0, 0], tmp_path / "tree.json", str(tmp_path / "tree.json"))
    ]
    assert sizes == [63, 2, 4, 4] and medusa(target, heads).num_draft_tokens == 16
    deep = Shape(tuple(range(-1, 9)))
    assert medusa(target, heads, shape=deep.parents).num_draft_tokens == 4, "one level per head"


def test_a_request_may_set_a_larger_budget_than_the_default() -> None:
    target, heads = AutomatonTarget(random_logits(5, VOCAB)), random_heads(5, VOCAB, 2)
    few = medusa(target, heads, shape=(-1, 0, 0, 0, 1, 1), num_draft_tokens=2)
    draft = drafted(few, [[1, 2]] * 3, torch.randn(3, 5), [few.num_draft_tokens, 4, 60], temperature=0)
    assert draft.counts == (3, 5, 6), "as far as the tree goes"


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_over_a_model_text_is_equal_and_a_reloaded_head_drafts_the_same(tmp_path: Path, family: str) -> None:
    target = models.target(family, max_rows=2)
    heads = models.medusa_heads(target)
    for layout in ("fasterdecoding", "vllm"):
        save_medusa(heads, tmp_path / layout, base_model="x", layout=layout, dtype=torch.float32)
    runs = []
    for head in (heads, str(tmp_path / "fasterdecoding"), str(tmp_path / "vllm")):
        engine = Engine(target, make_drafter("medusa", {"head": head}, target=target))
        params = [SamplingParams(temperature=t, seed=4, max_new_tokens=24) for t in (0.0, 1.0)]
        handles = engine.generate([models.prompt(17), models.prompt(5)], params)
        assert handles[0].tokens == models.greedy_text(family, 17, 24)
        runs.append([(handle.tokens, handle.stats.num_draft_tokens, handle.stats.steps) for handle in handles])
    assert runs[0] == runs[1] == runs[2]
    for (_, drafted_now, steps), (handle_tokens, *_) in pairwise(runs[0]):
        assert drafted_now > 0 and steps <= len(handle_tokens)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pick": "sampled"}, "pick: got 'sampled'; expected one of coupled, greedy"),
        ({"num_draft_tokens": 0}, "num_draft_tokens: got 0; expected at least 1"),
        ({"num_heads": 1}, "num_heads: got 1 with loaded heads; expected a folder"),
        ({"shape": "mc_sim"}, "shape: got 'mc_sim'; expected a file, a list of parents or one of mc_sim_7b_63"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"medusa {message}"):
        medusa(AutomatonTarget(random_logits(5, 8)), random_heads(5, 8, 2), **options)


def test_a_target_without_a_bundled_head_asks_for_one(tmp_path: Path) -> None:
    target = models.target("llama", max_rows=1)
    with pytest.raises(ValueError, match=r"^drafter medusa: head: got none; expected -o head=FOLDER"):
        make_drafter("medusa", {}, target=target)
    wide = MedusaHeads(target.hidden_size + 1, target.num_embeddings, 2)
    save_medusa(wide, tmp_path, base_model="x")
    with pytest.raises(ValueError, match=f"hidden size is {wide.hidden_size}, the target's is {target.hidden_size}"):
        make_drafter("medusa", {"head": str(tmp_path)}, target=target)


def test_the_bundled_heads_work_out_of_the_box() -> None:
    """Greedy and replayed text of the bundled target takes fewer passes, with the tree that was measured for it."""
    plain = load("demo-target", drafter="none", max_rows=2, max_length=128)
    engine = load("demo-target", drafter="medusa", max_rows=2, max_length=128)
    drafter: Any = engine.drafter
    assert drafter.heads.num_heads == 4 and drafter.pick == "coupled"
    prompts = ["def main(", "And it came to pass"]
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, seed=3, max_new_tokens=48, ignore_eos=True)
        handles = engine.generate(prompts, params)
        assert [handle.tokens for handle in handles] == [handle.tokens for handle in plain.generate(prompts, params)]
    assert engine.stats.tau > 1.3
