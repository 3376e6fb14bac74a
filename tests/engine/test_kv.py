"""After every step, the caches of target and draft equal a fresh forward pass over the committed tokens."""

from __future__ import annotations

from typing import Any

import pytest
from oracles import models
from oracles.kv_recompute import holds
from oracles.noisy_oracle import NoisyChain, NoisyTree

from specdec_fast import Engine, HuggingFaceTarget, SamplingParams, get_drafter


class Recorder:
    """A drafter that records the tokens its model processes."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.fed = inner, {}
        self.name, self.needs, self.num_draft_tokens = inner.name, inner.needs, inner.num_draft_tokens
        self.begin, self.observe, self.release = inner.begin, inner.observe, inner.release

    def propose(self, view: Any, rows: Any, budget: Any, rng: Any) -> Any:
        before = {row: list(view.tokens(row)) for row in rows}
        draft = self.inner.propose(view, rows, budget, rng)
        tokens = draft.tokens.tolist()
        for at, row in enumerate(rows):
            start, count = sum(draft.counts[:at]), draft.counts[at]
            if count > 1:  # all but the last draft token are stored
                self.fed[row] = [*before[row], *tokens[start + 1 : start + count - 1]]
        return draft


@pytest.mark.parametrize("page_size", [1, 16, 256])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral"])
def test_the_target_s_cache_after_every_step(family: str, page_size: int) -> None:
    lengths = (1, 5, 17)
    prompts = [models.prompt(length) for length in lengths]
    texts = [
        [*prompt, *models.greedy_text(family, length, 24)] for prompt, length in zip(prompts, lengths, strict=True)
    ]
    for kind, count in ((NoisyTree, 9), (NoisyChain, 4)):
        engine = Engine(models.target(family, page_size=page_size, num_pages=330), kind(texts, 0.7, 96, count))
        for prompt, new in zip(prompts, (24, 14, 20), strict=True):
            engine.submit(prompt, SamplingParams(temperature=0, max_new_tokens=new))
        while not engine.idle:
            engine.step()
            for row in engine._running:
                holds(engine.target, row, list(engine.state.tokens(row))[:-1], models.untouched(family))
        assert engine.stats.alpha > 0.2


@pytest.mark.parametrize("whole", [False, None], ids=["modules", "whole"])
@pytest.mark.parametrize(("pick", "page_size"), [("coupled", 1), ("sampled", 16), ("coupled", 256), ("greedy", 16)])
def test_the_draft_s_cache_after_every_step(pick: str, page_size: int, whole: bool | None) -> None:
    small = models.kin("llama")
    reference = models.kin("llama")
    recorder = Recorder(
        get_drafter("draft_model")(
            HuggingFaceTarget(small, max_length=320, page_size=page_size, fused_forward=whole),
            num_draft_tokens=4,
            pick=pick,
        )
    )
    rule = "rejection" if pick == "sampled" else "replay"
    engine = Engine(models.target("llama", page_size=page_size), recorder, rule=rule)
    for seed, length in enumerate((1, 17, 40)):
        engine.submit(models.prompt(length), SamplingParams(seed=seed, max_new_tokens=12 + 4 * seed))
    while not engine.idle:
        engine.step()
        for row in engine._running:
            holds(recorder.inner.model, row, recorder.fed[row], reference)
    assert engine.stats.alpha > 0.3
