"""Texts of engines on a GPU equal those on a CPU, for every rule on chains and trees.

Both sides use the same keyed randomness in float32. Their logits differ by roundings, which rarely change a token of
such short texts.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from oracles import heads, models
from oracles.simulated_gpu_engines import hybrid_engine, texts

from specdec_fast import Engine, HuggingFaceTarget, SamplingParams, get_drafter
from specdec_fast.rules import rule_names

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
PROMPTS = [models.prompt(length) for length in (5, 17, 40)]


def texts_on(device: str, rule: str, drafter: str, temperature: float, folder: Path) -> list[list[int]]:
    """Returns the texts of an engine, or skips where the rule cannot verify the drafter's proposals."""
    target = HuggingFaceTarget(models.own("llama").to(device), max_length=128, max_rows=4)
    if drafter == "eagle":
        proposer = get_drafter(drafter)(target, **heads.options(drafter, folder))
    else:
        small = HuggingFaceTarget(models.kin("llama").to(device), max_length=128, max_rows=4)
        proposer = get_drafter(drafter)(small, num_draft_tokens=3)
    try:
        engine = Engine(target, proposer, rule=rule)
    except ValueError as error:
        pytest.skip(str(error))
    wanted = [SamplingParams(temperature=temperature, seed=at, max_new_tokens=16 + at) for at in range(len(PROMPTS))]
    return [handle.tokens for handle in engine.generate(PROMPTS, wanted)]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("drafter", ["draft_model", "eagle"])
@pytest.mark.parametrize("rule", rule_names())
def test_texts_on_a_gpu_equal_those_on_a_cpu(rule: str, drafter: str, temperature: float, tmp_path: Path) -> None:
    wanted = texts_on("cpu", rule, drafter, temperature, tmp_path / "cpu")
    assert texts_on("cuda", rule, drafter, temperature, tmp_path / "gpu") == wanted


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("family", ["qwen3_next", "bamba", "lfm2"])
def test_greedy_texts_of_hybrids_on_a_gpu_equal_those_on_a_cpu(family: str, drafts: bool) -> None:
    wanted = texts(hybrid_engine(family, "cpu", "sync", drafts), 0.0, (1, 17))
    made = hybrid_engine(family, "cuda", "graph", drafts)
    assert texts(made, 0.0, (1, 17)) == wanted and made.step_mode == "graph", made.explain()
