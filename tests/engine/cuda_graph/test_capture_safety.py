"""The program of a CUDA-graph step does nothing that capture forbids, and the guard detects what is forbidden."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from oracles import models
from oracles.automaton import AutomatonTarget, random_logits
from oracles.capture_guard import CaptureError, capture_guard, check_repeats, guard_programs
from torch import Tensor

from specdec_fast import Engine, HuggingFaceTarget, SamplingParams, get_drafter
from specdec_fast.engine.cuda_graph import runner

MASK = torch.tensor([True, False, True])
FORBIDDEN: list[Callable[[Tensor], Any]] = [
    lambda x: x.sum().item(),
    lambda x: x.tolist(),
    lambda x: bool(x[0] > 0),
    lambda x: x.cpu(),
    lambda x: x.nonzero(),
    lambda x: x[MASK],
    lambda x: x + torch.tensor([1.0, 2.0, 3.0]),
    lambda x: torch.masked_select(x, MASK),
    lambda x: torch.unique(x),
    lambda x: x.repeat_interleave(torch.arange(3)),
    lambda x: torch.equal(x, x),
]


@pytest.mark.parametrize("deed", FORBIDDEN)
def test_the_guard_sees_what_cannot_be_captured(deed: Callable[[Tensor], Any]) -> None:
    with pytest.raises(CaptureError), capture_guard():
        deed(torch.ones(3))


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
@pytest.mark.parametrize("kind", ["none", "coupled", "greedy"])
def test_a_step_can_be_captured_and_uses_the_same_tensors_every_time(
    family: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every replay runs under the guard. It runs the same operators on the same shapes, and finds tensors from
    outside at the same addresses, while rows accept as much as they like and texts end.
    """
    runs = guard_programs(monkeypatch)
    target, drafter = models.target(family, max_rows=4, max_length=64), None
    if kind != "none":
        small = HuggingFaceTarget(models.kin(family), max_length=64, max_rows=4)
        drafter = get_drafter("draft_model")(small, num_draft_tokens=3, pick=kind)
    engine = Engine(target, drafter, step_mode="graph")
    prompts = [models.prompt(length) for length in (1, 5, 17)]
    wanted = [
        SamplingParams(temperature=t, seed=3, max_new_tokens=n, top_p=0.9) for t, n in ((0, 4), (1, 9), (0.7, 24))
    ]
    handles = engine.generate(prompts, wanted)
    assert [len(handle.tokens) for handle in handles] == [4, 9, 24] and engine.step_mode == "graph"
    names = check_repeats(runs)
    assert {
        "specdec.tree_attention.default",
        "specdec.kv_commit_table.default",
        "specdec.exact_match_verify.default",
    } <= names


def test_a_model_that_cannot_be_captured_continues_in_sync_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers reads the tokens of GPT-2 on the host, to warn of padding."""

    wanted = SamplingParams(temperature=0, max_new_tokens=6)
    want = models.greedy_text("gpt2", 5, 6)
    guard_programs(monkeypatch)
    engine = Engine(models.target("gpt2", max_rows=2, max_length=64), step_mode="graph")
    assert engine.generate([models.prompt(5)], wanted)[0].tokens == want
    assert "a CUDA-graph step failed" in engine.explain()


def test_a_pending_step_does_not_change_a_row_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host learns of an end one step late. Until then the device emits no tokens for the row, stores none, and
    keeps no token after its end.
    """
    run, seen = runner.StepProgram.__call__, set()

    def watched(program: Any) -> None:
        state, cache = program.state, program.target.cache
        ended = {row: at for at, row in enumerate(program.rows.tolist()) if program.live[at] and state.done[row]}
        before = {row: (int(state.lengths[row]), int(cache.lengths[row])) for row in ended}
        run(program)
        for row, at in ended.items():
            assert program.read(program.results)[at] is None
            length = int(state.lengths[row])
            assert (length, int(cache.lengths[row])) == before[row]
            seen.add("limit" if length == int(state.limits[row]) else int(state.device_tokens[row, length - 1]))

    monkeypatch.setattr(runner.StepProgram, "__call__", watched)
    table = random_logits(31, 9, seed=4)
    drafter = get_drafter("draft_model")(AutomatonTarget(table, max_rows=3), num_draft_tokens=3)
    engine = Engine(AutomatonTarget(table, max_rows=3), drafter, eos_token_ids=(3,), step_mode="graph")
    prompts = [[at % 9, 1 + at % 7] for at in range(12)]
    wanted = [SamplingParams(temperature=0.9, seed=at, max_new_tokens=4 + at) for at in range(12)]
    handles = engine.generate(prompts, wanted)
    assert {handle.finish_reason for handle in handles} == {"eos", "length"} and seen == {"limit", 3}


def test_streams_graphs_and_events_belong_to_the_gpu_of_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """If another GPU is current, the state's GPU becomes current while a program is captured and launched."""
    gpu, current, seen = torch.device("cuda:1"), [torch.device("cuda:0")], []

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    def part(name: str) -> Callable[..., MagicMock]:
        return lambda *args, **kwargs: seen.append((name, current[-1])) or MagicMock()

    monkeypatch.setattr(torch.cuda, "device", on)
    parts = ("Stream", "current_stream", "stream", "CUDAGraph", "graph", "Event", "graph_pool_handle")
    for name in parts:
        monkeypatch.setattr(torch.cuda, name, part(name))
    for name in ("get_sync_debug_mode", "set_sync_debug_mode"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    monkeypatch.setattr(torch, "zeros", part("program"))
    runner.capture(part("program"), gpu)
    steps = runner.CudaGraphRunner.__new__(runner.CudaGraphRunner)
    steps._state, steps._drafting, steps._pending = MagicMock(device=gpu, max_rows=1), set(), []
    made = MagicMock(num_runs=0, run=part("run"))
    made.ring[0].copy_ = part("copy")
    for name, value in (("_enter", None), ("_choose_capacity", 0), ("_get_program", made), ("_write_inputs", None)):
        monkeypatch.setattr(steps, name, lambda *args, answer=value: answer)
    steps.launch({0: MagicMock(params=SamplingParams())})
    assert {name for name, _ in seen} == {*parts, "program", "run", "copy"} and len(current) == 1
    assert {where for _, where in seen} == {gpu}
