"""Drafters over a target with recurrent layers: texts are those of plain decoding, or drafters are refused in words."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from oracles import heads, hybrid_models, models

from specdec_fast import Engine, HuggingFaceTarget, SamplingParams
from specdec_fast.cache.recurrent_states import RecurrentStates
from specdec_fast.drafters import drafter_names, make_drafter, takes_draft
from specdec_fast.heads.checkpoint_mtp import save_mtp
from specdec_fast.heads.mtp import build_mtp_head
from specdec_fast.retrieval.datastore import build
from specdec_fast.targets.tiny_models import tiny_model

PROMPTS = ([0, 5, 6, 7, 8, 9, 3, 4], [11, 12, 13], [40, 41, 42, 40, 41, 42, 40, 41], [1], [7, 7])
TEMPERATURES = (0.0, 0.7, 0.0, 1.0, 0.7)
FAMILIES = ("qwen3_next", "bamba", "lfm2")
MODULES = {("mtp", "bamba"), ("mtp", "lfm2")}
"""Targets whose layers make no module of multi-token prediction."""


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
    if name == "mtp":
        save_mtp(folder / name, build_mtp_head(target(family)), target(family).num_layers, layout="qwen")
        return {"head": str(folder / name)}
    if name in ("eagle", "eagle3"):
        return heads.options(name, folder)
    if name in models.HEADS:
        return {"head": models.HEADS[name](target(family))}
    if name == "rest":
        texts = [[*prompt, *text] for prompt, text in zip(PROMPTS, plain(family)[0])]
        build(folder / "texts", texts, vocab_size=96)
        return {"datastore": str(folder / "texts"), "min_match": 1}
    return {}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", drafter_names())
def test_texts_are_those_of_plain_decoding(name: str, family: str, tmp_path: Path) -> None:
    """Five ragged rows, an end inside of a text, and rows that end earlier than others."""
    if (name, family) in MODULES:
        with pytest.raises(ValueError, match="mtp: got a target of model_type"):
            build_mtp_head(target(family))
        return
    want, ends = plain(family)
    draft = small if takes_draft(name) else None
    drafter = make_drafter(name, options(name, family, tmp_path), target=target(family), draft=draft)
    engine = Engine(target(family), drafter, eos_token_ids=ends)
    handles = engine.generate([list(each) for each in PROMPTS], params())
    assert [list(handle.tokens) for handle in handles] == want
    if name == "rest":
        assert engine.stats.tau > 1.5


@pytest.mark.parametrize("family", hybrid_models.MIXERS.values())
@pytest.mark.parametrize("name", ["layer_skip", "draft_tree"])
def test_a_target_that_drafts_for_itself_is_right(name: str, family: str) -> None:
    """All greedy tokens are accepted: the states of the draft are those of its text, after rejections too."""
    own = HuggingFaceTarget(hybrid_models.model(family), max_rows=5)
    greedy = SamplingParams(temperature=0, max_new_tokens=24, ignore_eos=True)
    want = [list(each.tokens) for each in Engine(own).generate([list(each) for each in PROMPTS], greedy)]
    if name == "layer_skip":
        drafter = make_drafter(name, {"skip_attention": [], "num_draft_tokens": 5, "stop": "fixed"}, target=own)
    else:
        twin = HuggingFaceTarget(tiny_model(family), max_rows=5)
        drafter = make_drafter(name, {"depth": 4}, target=own, draft=lambda: twin)
    engine = Engine(own, drafter)
    assert [list(each.tokens) for each in engine.generate([list(each) for each in PROMPTS], greedy)] == want
    assert engine.stats.tau > 4
    own.close()


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_drafts_that_were_interrupted_leave_no_states(
    error: type[BaseException], monkeypatch: Any, faults: Any
) -> None:
    """layer_skip cannot write the states back. Its rows are computed again, and their texts stay."""
    own = HuggingFaceTarget(hybrid_models.model("bamba"), max_rows=5)
    greedy = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
    want = [list(each.tokens) for each in Engine(own).generate([list(each) for each in PROMPTS[:2]], greedy)]
    engine = Engine(own, make_drafter("layer_skip", {"stop": "fixed"}, target=own))
    handles = [engine.submit(list(each), greedy) for each in PROMPTS[:2]]
    write, calls = RecurrentStates.write, []

    def failing(self: RecurrentStates, *given: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise error("no more")
        write(self, *given)

    monkeypatch.setattr(RecurrentStates, "write", failing)
    while not engine.idle:
        try:
            engine.step()
        except KeyboardInterrupt:
            assert own.cache.unsettled
    assert len(calls) >= 2 and [list(handle.tokens) for handle in handles] == want and not own.cache.unsettled
    own.close()
