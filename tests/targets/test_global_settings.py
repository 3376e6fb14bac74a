"""What programs switch on in torch changes no text: default dtypes, deterministic algorithms, autocast."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from oracles import models

from specdec_fast import SamplingParams, load
from specdec_fast.core.draft import Draft
from specdec_fast.loading import load_model
from specdec_fast.targets.huggingface import HuggingFaceTarget

WAYS = [("replay", "draft_model"), ("recursive_rejection", "draft_tree"), ("replay", "eagle3"), ("replay", "recycling")]
PARAMS = [
    SamplingParams(
        temperature=0.8, seed=3, top_p=0.9, min_p=0.02, max_new_tokens=12, ignore_eos=True, repetition_penalty=1.1,
        logit_bias={300: 1.5}, logprobs=1,
    ),
    SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True),
]  # fmt: skip


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


SETTINGS: dict[str, Any] = {
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "deterministic": deterministic,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


def texts(rule: str, drafter: str) -> tuple[list[Any], list[Any], int]:
    draft = load_model("demo-draft") if drafter.startswith("draft") else None
    engine = load(load_model("demo-target"), draft, drafter=drafter, rule=rule, max_rows=2, max_length=96)
    found = engine.generate([list(range(40, 60)), [7, 8, 9, 7, 8, 9, 7, 8]], PARAMS)
    assert not any(each.error for each in found)
    logprobs = [round(one.logprob, 3) for each in found for one in each.logprobs or ()]
    return [each.tokens for each in found], logprobs, engine.stats.faults


@pytest.fixture(scope="module")
def usual() -> dict[tuple[str, str], Any]:
    return {way: texts(*way) for way in WAYS}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("way", WAYS, ids=" ".join)
def test_texts_do_not_depend_on_settings_of_torch(setting: str, way: tuple[str, str], usual: Any) -> None:
    with SETTINGS[setting]():
        assert texts(*way) == usual[way]
    assert usual[way][2] == 0


def test_a_target_s_passes_run_without_autocast() -> None:
    target, text = models.target("llama"), models.prompt(12)
    draft = Draft.chains([0], [text])
    target.cache.reserve(0, 12)
    with torch.autocast("cpu", torch.bfloat16):
        inside = target.score(draft, draft.get_plan())[0].logits
        opened = HuggingFaceTarget(models.own("llama"), max_rows=1, max_length=32)
        assert torch.is_autocast_enabled("cpu")
    assert inside is not None and inside.dtype == torch.float32 == opened.cache.keys[0].dtype
    assert torch.equal(inside, target.score(draft, draft.get_plan())[0].logits)
