"""Whole engine steps on a simulated GPU, with every drafter that takes part in CUDA-graph steps.

Texts are those of the CPU, a CUDA-graph step reads nothing, and the numbers of launches are recorded in
`launches_per_step.json`. `SPECDEC_RECORD=1` writes that file anew.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from oracles import models
from oracles.simulated_gpu_engines import KINDS, engine, texts

from specdec_fast import SamplingParams
from specdec_kernels import simulated_gpu

RECORDED = Path(__file__).with_name("launches_per_step.json")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["sync", "graph"])
def test_texts_on_a_gpu_are_those_of_the_cpu(kind: str, mode: str, tmp_path: Path) -> None:
    want = texts(engine(kind, "cpu", tmp_path, "sync"))
    with simulated_gpu.gpu("sm_90") as gpu:
        made = engine(kind, "cuda", tmp_path, mode)
        gpu.clear()
        assert texts(made) == want
        assert made.step_mode == mode, made.explain()
        assert gpu.uploads == []
        assert {launch.device for launch in gpu.launches} == {0}
        assert bool(gpu.captures) == (mode == "graph")


@pytest.mark.parametrize("kind", ["none", "draft_model", "eagle dynamic", "medusa"])
def test_greedy_texts_on_the_second_gpu_are_those_of_the_cpu(kind: str, tmp_path: Path) -> None:
    want = texts(engine(kind, "cpu", tmp_path, "sync"), 0.0)
    with simulated_gpu.gpu("sm_90", devices=2) as gpu:
        made = engine(kind, "cuda:1", tmp_path)
        gpu.clear()
        assert texts(made, 0.0) == want
        assert {launch.device for launch in gpu.launches} == {1}
        assert gpu.current == 0


def turns(made: Any) -> list[list[int]]:
    """Texts of two samples of one prompt, and of a prompt that continues the first one."""
    prompt, found = models.prompt(40), []
    for text in ([], [7]):
        params = [SamplingParams(temperature=0.8, seed=seed, max_new_tokens=9) for seed in (1, 2)]
        found += made.generate([[*prompt, *(found[0] if found else []), *text]] * 2, params)
        found = [getattr(each, "tokens", each) for each in found]
    return found


@pytest.mark.parametrize("kind", ["none", "draft_model", "eagle dynamic"])
def test_texts_of_shared_pages_on_a_gpu_are_those_of_the_cpu(kind: str, tmp_path: Path) -> None:
    want = turns(engine(kind, "cpu", tmp_path, "sync"))
    with simulated_gpu.gpu("sm_90") as gpu:
        made = engine(kind, "cuda", tmp_path)
        gpu.clear()
        assert turns(made) == want
        assert gpu.uploads == [] and gpu.captures
        assert made.stats.cached_tokens == (112 if kind == "eagle dynamic" else 128)


def steady(kind: str, mode: str, folder: Path, gpu: simulated_gpu.Gpu) -> Any:
    """An engine with two running requests, some steps into their texts."""
    made = engine(kind, "cuda", folder, mode, max_rows=2)
    for seed, length in enumerate((5, 17)):
        made.submit(models.prompt(length), SamplingParams(temperature=0.8, seed=seed, max_new_tokens=60, top_p=0.95))
    for _ in range(4):
        made.step()
    gpu.clear()
    return made


def counted(kind: str, folder: Path) -> dict[str, dict[str, int]]:
    """Launches of a step of two requests: captured, and with the host in between."""
    with simulated_gpu.gpu("sm_90") as gpu:
        made = engine(kind, "cuda", folder, "graph", max_rows=2)
        for seed, length in enumerate((5, 17)):
            made.submit(
                models.prompt(length), SamplingParams(temperature=0.8, seed=seed, max_new_tokens=60, top_p=0.95)
            )
        for _ in range(4):
            made.step()
        graph = max(gpu.captures, key=lambda each: each.replays)
        found = {"captured": {"triton": len(graph.kernels), "torch": graph.operators.total()}}
    with simulated_gpu.gpu("sm_90") as gpu:
        steady(kind, "sync", folder, gpu).step()
        found["sync"] = {
            "triton": len(gpu.launches),
            "torch": gpu.operators.total(),
            "host_reads": len(gpu.host_reads),
        }
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_launches_as_much_as_is_recorded(kind: str, tmp_path: Path) -> None:
    """A step that launches less is good news: record it."""
    found = counted(kind, tmp_path)
    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    if os.environ.get("SPECDEC_RECORD") == "1":
        RECORDED.write_text(json.dumps(dict(sorted({**recorded, kind: found}.items())), indent=1) + "\n")
        return
    assert found == recorded[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_a_captured_step_reads_nothing(kind: str, tmp_path: Path) -> None:
    """Between two captures the host waits for events only, and copies nothing from pageable memory."""
    with simulated_gpu.gpu("sm_90") as gpu:
        made = steady(kind, "graph", tmp_path, gpu)
        for _ in range(3):
            made.step()
        assert gpu.captures == [] and gpu.launches == []
        assert gpu.host_reads == [] and gpu.uploads == []
        assert gpu.events_awaited == 3


def test_every_kind_is_recorded_and_nothing_else() -> None:
    assert set(json.loads(RECORDED.read_text())) == set(KINDS)
