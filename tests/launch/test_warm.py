"""`Engine.warm`: afterwards steps compile and capture nothing, and the engine equals a fresh one."""

from __future__ import annotations

from pathlib import Path

import pytest
from oracles import models
from oracles.simulated_gpu_engines import drafter

from specdec_fast import Engine, HuggingFaceTarget, SamplingParams
from specdec_fast.core import chain_layout
from specdec_kernels import simulated_gpu

KINDS = ("none", "draft_model", "eagle", "eagle dynamic", "medusa")
ROWS, DRAFTED = 8, 8
PAIRS = [(rows, drafted) for rows in range(1, ROWS + 1) for drafted in range(DRAFTED + 1)]


@pytest.fixture(autouse=True)
def nothing_remembered() -> None:
    """Shapes that earlier simulated GPUs have met, with plans that were made there."""
    chain_layout._remembered_layout.cache_clear()


def engine(kind: str, folder: Path, mode: str = "auto") -> Engine:
    target = HuggingFaceTarget(models.own("llama").to("cuda"), max_length=96, max_rows=ROWS)
    return Engine(target, drafter(kind, target, folder), step_mode=mode, prefill_chunk=32)


def serve(made: Engine, rows: int, drafted: int, temperature: float) -> None:
    """Some steps of a batch of prompts of different lengths."""
    params = SamplingParams(temperature=temperature, seed=rows, max_new_tokens=2 * drafted + 4)
    handles = [made.submit(models.prompt(2 + 7 * at), params, num_draft_tokens=drafted) for at in range(rows)]
    for _ in range(3):
        made.step()
    for handle in handles:
        made.cancel(handle)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_compiled_nor_captured_after_warm(kind: str, tmp_path: Path) -> None:
    with simulated_gpu.gpu("sm_90") as gpu:
        made = engine(kind, tmp_path)
        made.warm([(rows, most) for rows in (1, 2, 4, 8) for most in (0, DRAFTED)])
        assert gpu.compiled and gpu.captures
        gpu.clear()
        for rows, drafted in PAIRS:
            for temperature in (0.0, 0.8):
                serve(made, rows, drafted, temperature)
        assert gpu.compiled == [] and gpu.captures == [] and gpu.uploads == []
        assert made.step_mode == "graph", made.explain()


def test_steps_that_are_not_captured_are_warm_too(tmp_path: Path) -> None:
    with simulated_gpu.gpu("sm_90") as gpu:
        made = engine("draft_model", tmp_path, "sync")
        made.warm([(rows, DRAFTED) for rows in (1, 8)])
        assert gpu.compiled and gpu.captures == []
        gpu.clear()
        for at, (rows, drafted) in enumerate(PAIRS[::30]):
            serve(made, rows, drafted, 0.8 * (at % 2))
        assert gpu.compiled == [] and gpu.uploads == []


def test_warm_between_steps_of_requests_changes_nothing(tmp_path: Path) -> None:
    """Two requests are under way, in CUDA-graph steps, and a third waits for a row."""
    params = [SamplingParams(temperature=0.8, seed=at, max_new_tokens=12) for at in range(3)]
    found = []
    for warm in (False, True):
        with simulated_gpu.gpu("sm_90"):
            target = HuggingFaceTarget(models.own("llama").to("cuda"), max_length=64, max_rows=3)
            made = Engine(target, drafter("draft_model", target, tmp_path), prefill_chunk=16)
            handles = [made.submit(models.prompt(5 + at), params[at]) for at in range(2)]
            for _ in range(3):
                made.step()
            if warm:
                tokens = [list(handle.tokens) for handle in handles]
                made.warm([(1, 4), (3, 4)])
                assert [handle.tokens[: len(before)] for handle, before in zip(handles, tokens)] == tokens
            handles.append(made.submit(models.prompt(7), params[2]))
            returned = set()
            while not made.idle:
                returned |= {handle.request_id for handle in made.step()}
            assert returned == {0, 1, 2} and target.cache.pages.num_used == 0
            stats = made.stats.as_dict()
            found.append([[handle.tokens for handle in handles], stats["new_tokens"], stats["faults"]])
    assert found[0] == found[1]
