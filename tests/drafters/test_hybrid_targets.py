"""Drafters over a target with recurrent layers: texts are those of plain decoding, or drafters are refused in words."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from oracles import hybrid_models, models

from specdec_fast import Engine, HuggingFaceTarget, SamplingParams
from specdec_fast.drafters import drafter_names, make_drafter, takes_draft
from specdec_fast.retrieval.datastore import build

PROMPTS = ([0, 5, 6, 7, 8, 9, 3, 4], [11, 12, 13], [40, 41, 42, 40, 41, 42, 40, 41], [1], [7, 7])
TEMPERATURES = (0.0, 0.7, 0.0, 1.0, 0.7)
FAMILIES = ("qwen3_next", "bamba", "lfm2")
NO_MODULES = ("mtp", "eagle", "eagle3")
"""Heads that are built from layers of a Llama, which hybrid targets do not have."""


@functools.cache
def target(family: str) -> HuggingFaceTarget:
    return HuggingFaceTarget(hybrid_models.model(family), max_rows=5, page_size=8)


@functools.cache
def small() -> HuggingFaceTarget:
    return HuggingFaceTarget(models.kin("llama"), max_rows=5, max_length=320)


def params() -> list[SamplingParams]:
    return [
        SamplingParams(temperature=each, seed=40 + at, max_new_tokens=20 - 3 * at)
        for at, each in enumerate(TEMPERATURES)
    ]


@functools.cache
def plain(family: str) -> tuple[list[list[int]], tuple[int, ...]]:
    """Texts of plain decoding, and an end of text that occurs in one of them."""
    free = Engine(target(family)).generate([list(each) for each in PROMPTS], params())
    ends = (free[0].tokens[9],)
    handles = Engine(target(family), eos_token_ids=ends).generate([list(each) for each in PROMPTS], params())
    assert any(handle.finish_reason == "eos" for handle in handles)
    return [list(handle.tokens) for handle in handles], ends


def options(name: str, family: str, folder: Path) -> dict[str, Any]:
    if name in models.HEADS:
        return {"head": models.HEADS[name](target(family))}
    if name == "rest":
        texts = [[*prompt, *text] for prompt, text in zip(PROMPTS, plain(family)[0])]
        build(folder / "texts", texts, vocab_size=96)
        return {"datastore": str(folder / "texts"), "min_match": 1}
    return {}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", [each for each in drafter_names() if each not in (*NO_MODULES, "layer_skip")])
def test_texts_are_those_of_plain_decoding(name: str, family: str, tmp_path: Path) -> None:
    """Five ragged rows, an end inside of a text, and rows that end earlier than others."""
    want, ends = plain(family)
    draft = small if takes_draft(name) else None
    drafter = make_drafter(name, options(name, family, tmp_path), target=target(family), draft=draft)
    engine = Engine(target(family), drafter, eos_token_ids=ends)
    handles = engine.generate([list(each) for each in PROMPTS], params())
    assert [list(handle.tokens) for handle in handles] == want
    if name == "rest":
        assert engine.stats.tau > 1.5


def test_what_needs_a_rollback_is_refused() -> None:
    hybrid = target("qwen3_next")
    with pytest.raises(ValueError, match=r"layer_skip: got a Qwen3NextForCausalLM that drafts, but it has recurrent"):
        make_drafter("layer_skip", {}, target=hybrid)
    with pytest.raises(ValueError, match=r"draft_tree: got a Qwen3NextForCausalLM that drafts.*draft with another"):
        make_drafter("draft_tree", {}, target=hybrid, draft=lambda: hybrid)


def test_prefixes_are_not_shared() -> None:
    engine = Engine(target("bamba"))
    assert engine._prefixes.explain() == "off: it has recurrent layers, whose earlier states are not kept"
