"""Blockwise parallel decoding: the number of passes of an oracle, and the layout of its heads."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import models
from oracles.automaton import AutomatonTarget, random_logits, scripted
from torch import nn

from specdec_fast import Engine, SamplingParams, get_drafter, load
from specdec_fast.drafters import make_drafter
from specdec_fast.heads.blockwise import BlockwiseHeads
from specdec_fast.heads.checkpoint_blockwise import load_blockwise, save_blockwise

VOCAB, HEADS = 9, 3


def oracle(target: AutomatonTarget) -> BlockwiseHeads:
    """Heads that turn state s, one-hot, into state s + 1 + k: they subtract the residual and add the later state."""
    states = len(target.table)
    made = BlockwiseHeads(states, target.vocab_size, HEADS, inner_size=states)
    with torch.no_grad():
        made.inner.weight.copy_(torch.eye(states).repeat(HEADS, 1))
        made.inner.bias.zero_()
        for head in range(HEADS):
            own = slice(head * states, (head + 1) * states)
            ahead = (torch.arange(states) + 1 + head).clamp(max=states - 1)
            made.outer.weight[own, own] = torch.eye(states)[ahead].T - torch.eye(states)
    return made


def some_heads(hidden: int, vocab: int) -> BlockwiseHeads:
    torch.manual_seed(0)
    made = BlockwiseHeads(hidden, vocab, HEADS, inner_size=7)
    nn.init.normal_(made.outer.weight)
    return made


@pytest.mark.parametrize("new_tokens", [12, 21, 30])
def test_an_oracle_needs_one_pass_per_block(new_tokens: int) -> None:
    """m tokens in blocks of k = heads + 1 need ceil(m / k) passes. The paper counts the prompt's pass too."""
    source = random.Random(1)
    script = [source.randrange(VOCAB) for _ in range(60)]
    target = scripted(script, VOCAB)
    engine = Engine(target, get_drafter("blockwise")(target, oracle(target)))
    handle = engine.generate([script[:4]], SamplingParams(temperature=0, max_new_tokens=new_tokens))[0]
    assert handle.tokens == script[4 : 4 + new_tokens]
    assert handle.stats.steps == -(-new_tokens // (HEADS + 1))


def test_random_heads_cost_no_pass() -> None:
    target, plain = (AutomatonTarget(random_logits(23, VOCAB, seed=2)) for _ in range(2))
    params = SamplingParams(temperature=0, max_new_tokens=30)
    want = Engine(plain).generate([[1, 2, 3]], params)[0]
    handle = Engine(target, get_drafter("blockwise")(target, some_heads(23, VOCAB))).generate([[1, 2, 3]], params)[0]
    assert handle.tokens == want.tokens and handle.stats.steps <= 30 and handle.stats.num_draft_tokens > 0


def test_untrained_heads_equal_the_target() -> None:
    heads, projection = BlockwiseHeads(6, VOCAB, HEADS), nn.Linear(6, VOCAB)
    states = torch.randn(4, 6)
    torch.testing.assert_close(heads(states, projection), projection(states).expand(HEADS, 4, VOCAB))
    with pytest.raises(ValueError, match="got no projection"):
        heads(states)


def test_a_saved_and_reloaded_head_drafts_the_same(tmp_path: Path) -> None:
    target = models.target("llama", max_rows=2)
    heads = some_heads(target.hidden_size, target.num_embeddings)
    save_blockwise(heads, tmp_path, base_model="x", dtype=torch.float32)
    counts = []
    for head in (heads, str(tmp_path)):
        engine = Engine(target, make_drafter("blockwise", {"head": head}, target=target))
        handle = engine.generate([models.prompt(17)], SamplingParams(temperature=0, max_new_tokens=20))[0]
        assert handle.tokens == models.greedy_text("llama", 17, 20)
        counts.append((handle.stats.num_draft_tokens, handle.stats.steps))
    assert counts[0] == counts[1] and counts[0][0] > 0


def test_faults_are_named(tmp_path: Path) -> None:
    save_blockwise(some_heads(6, VOCAB), tmp_path, base_model="x")

    def load(**sizes: int) -> Any:
        return load_blockwise(tmp_path, **{"hidden_size": 6, "vocab_size": VOCAB, **sizes})

    assert load().inner_size == 7
    with pytest.raises(ValueError, match="hidden_size is 6, the target's is 8"):
        load(hidden_size=8)
    with pytest.raises(ValueError, match="vocab_size is 9, the target's is 10"):
        load(vocab_size=10)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_heads": 2}))
    with pytest.raises(ValueError, match=r"config\.json: field 'num_heads' is 2, but outer\.weight in .* has 18 rows"):
        load()
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "medusa"}))
    with pytest.raises(ValueError, match=r"got model_type 'medusa'.*expected 'blockwise' and all sizes"):
        load()


def test_the_bundled_heads_work_out_of_the_box() -> None:
    plain = load("demo-target", drafter="none", max_rows=1, max_length=96)
    engine = load("demo-target", drafter="blockwise", max_rows=1, max_length=96)
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, seed=3, max_new_tokens=40, ignore_eos=True)
        handle = engine.generate(["And it came to pass"], params)[0]
        assert handle.tokens == plain.generate(["And it came to pass"], params)[0].tokens
    assert engine.stats.tau > 1.1
