"""The contract of drafters over tiny transformers models, for every registered name, built as `load` builds it.

One ragged batch of five per drafter and family: prompts of 1 to 200 tokens, temperatures 0, 0.7 and 1, different
lengths, an end inside a text, token 0 in a prompt and as padding and end of text, a vocabulary of 96.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import heads, models
from oracles.kv_recompute import holds

from specdec_fast import Engine, HuggingFaceTarget, SamplingParams
from specdec_fast.drafters import drafter_names, make_drafter, takes_draft
from specdec_fast.heads.checkpoint_mtp import save_mtp
from specdec_fast.heads.mtp import build_mtp_head
from specdec_fast.interfaces import Drafter
from specdec_fast.retrieval.datastore import build

FAMILIES = ("llama", "qwen3", "gpt2", "mistral")
LENGTHS = (1, 5, 17, 75, 200)
LIMITS = (24, 9, 1, 20, 16)
TEMPERATURES = (0.0, 0.7, 0.0, 1.0, 0.7)


def datastore(folder: Path) -> dict[str, Any]:
    """Writes a datastore of the target's texts, so that look-ups succeed."""
    texts = [[*models.prompt(n), *models.greedy_text("llama", n, 24)] for n in (5, 17, 40)]
    build(folder / "texts", texts, vocab_size=96)
    return {"datastore": str(folder / "texts"), "min_match": 1}


# Required options of drafters (a file, for example), made in a folder of the test.
OPTIONS: dict[str, Callable[[Path], dict[str, Any]]] = {
    **{name: (lambda folder, make=make: {"head": make(target("llama"))}) for name, make in models.HEADS.items()},
    "rest": datastore,
    "eagle": functools.partial(heads.options, "eagle"),
    "eagle3": functools.partial(heads.options, "eagle3"),
    "mtp": functools.partial(heads.options, "mtp"),
}
# Drafters that do not support a family, and their messages.
REFUSED = {("mtp", "gpt2"): "expected decoder layers with an RMS norm"}


@functools.cache
def target(family: str) -> HuggingFaceTarget:
    return models.target(family, max_rows=5, page_size=8)


@functools.cache
def small(family: str) -> HuggingFaceTarget:
    return HuggingFaceTarget(models.kin(family), max_rows=5, max_length=320)


def prompts() -> list[list[int]]:
    """Returns ragged prompts. Those of several tokens begin with token 0, which is padding and an end of text too."""
    return [[0, *models.prompt(length - 1)] if length > 1 else models.prompt(1) for length in LENGTHS]


def params(rotate: int = 0) -> list[SamplingParams]:
    return [
        SamplingParams(temperature=TEMPERATURES[(at + rotate) % 5], seed=40 + at, max_new_tokens=limit)
        for at, limit in enumerate(LIMITS)
    ]


@functools.cache
def plain(family: str, rotate: int) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """Returns texts of plain decoding, and their end-of-text ids: token 0, and one that occurs in a text."""
    free = Engine(target(family)).generate(prompts(), params(rotate))
    ends = (0, free[0].tokens[13])
    handles = Engine(target(family), eos_token_ids=ends).generate(prompts(), params(rotate))
    assert any(handle.finish_reason == "eos" for handle in handles)
    return tuple(tuple(handle.tokens) for handle in handles), ends


def made(name: str, family: str, folder: Path) -> Drafter:
    draft = (lambda: small(family)) if takes_draft(name) else None
    options = OPTIONS.get(name, lambda _: {})(folder)
    if name == "mtp" and family != "llama":  # its layer has the target's architecture
        head = build_mtp_head(target(family))
        save_mtp(folder / family, head, target(family).num_layers)
        options = {"head": str(folder / family)}
    return make_drafter(name, options, target=target(family), draft=draft)


def holds_committed(model: Any, engine: Engine, committed: dict[int, list[int]], family: str) -> None:
    """Checks that a draft model stores the committed keys of every row, or none yet."""
    for row, tokens in committed.items():
        if row in engine._running and int(model.cache.lengths[row]):
            holds(model, row, tokens, draft_reference(family), whole=False)


@functools.cache
def draft_reference(family: str) -> Any:
    return models.kin(family)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", drafter_names())
def test_five_ragged_rows_decode_as_without_drafts(name: str, family: str, tmp_path: Path) -> None:
    """Texts are equal, limits exact, passes not more; keys and values of target and draft equal a recomputation."""
    rotate = FAMILIES.index(family)
    if (name, family) in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[name, family]):
            made(name, family, tmp_path)
        return
    want, ends = plain(family, rotate)
    drafter = made(name, family, tmp_path)
    engine = Engine(target(family), drafter, eos_token_ids=ends)
    handles = [engine.submit(*each) for each in zip(prompts(), params(rotate), strict=True)]
    steps = 0
    while not engine.idle:
        committed = {row: list(engine.state.tokens(row))[:-1] for row in engine._running}
        engine.step()
        steps += 1
        if family == FAMILIES[0] or steps in (1, 2, 5):
            for row in engine._running:
                holds(engine.target, row, list(engine.state.tokens(row))[:-1], models.untouched(family))
            if takes_draft(name):
                holds_committed(small(family), engine, committed, family)
    assert [tuple(handle.tokens) for handle in handles] == list(want)
    assert all(handle.stats.steps <= len(handle.tokens) for handle in handles)
    for handle, limit in zip(handles, LIMITS, strict=True):
        assert handle.finish_reason == ("eos" if handle.tokens[-1] in ends else "length")
        assert len(handle.tokens) == limit or handle.finish_reason == "eos"
    if takes_draft(name):
        assert engine.stats.tau > 1.2, "nothing was accepted: the test would prove little"
        assert small(family).cache.pages.num_used == 0
    assert engine.target.cache.pages.num_used == 0


@pytest.mark.parametrize("name", drafter_names())
def test_greedy_text_is_that_of_generate_and_a_second_call_repeats_the_first(name: str, tmp_path: Path) -> None:
    engine = Engine(target("llama"), made(name, "llama", tmp_path))
    greedy = SamplingParams(temperature=0, max_new_tokens=16)
    for _ in range(2):
        handles = engine.generate([models.prompt(17), models.prompt(40)], greedy)
        assert [handle.tokens for handle in handles] == [models.greedy_text("llama", n, 16) for n in (17, 40)]


@pytest.mark.parametrize("name", [name for name in drafter_names() if takes_draft(name)])
def test_a_draft_that_is_the_target_is_always_accepted(name: str, tmp_path: Path) -> None:
    """Every path ends at a leaf, and a chain of K gives K + 1 tokens in every step but the last."""
    same = HuggingFaceTarget(models.own("llama"), max_rows=5, max_length=320)
    drafter = make_drafter(name, OPTIONS.get(name, lambda _: {})(tmp_path), target=target("llama"), draft=lambda: same)
    engine = Engine(target("llama"), drafter)
    handles = engine.generate(
        prompts(), [SamplingParams(temperature=t, seed=4, max_new_tokens=21) for t in TEMPERATURES]
    )
    for handle in handles:
        assert "recovered" not in handle.origins and "plain" not in handle.origins[:-1]
        if drafter.needs.topology == "chain":
            assert handle.stats.steps == -(-21 // (1 + handle.num_draft_tokens))


@pytest.mark.parametrize("name", [name for name in drafter_names() if takes_draft(name)])
def test_a_draft_that_is_always_wrong_costs_no_extra_pass(name: str, tmp_path: Path) -> None:
    """The draft's head is negated: the target's likeliest token is its least likely."""
    wrong = models.own("llama")
    with torch.no_grad():
        wrong.get_output_embeddings().weight.neg_()
    against = HuggingFaceTarget(wrong, max_rows=5, max_length=320)
    options = OPTIONS.get(name, lambda _: {})(tmp_path)
    drafter = make_drafter(name, options, target=target("llama"), draft=lambda: against)
    engine = Engine(target("llama"), drafter)
    handles = engine.generate([models.prompt(17)], SamplingParams(temperature=0, max_new_tokens=16))
    assert handles[0].tokens == models.greedy_text("llama", 17, 16) and handles[0].stats.steps <= 16
    assert engine.stats.num_draft_tokens > 0 and engine.stats.alpha < 0.2
