"""Capture of steps on simulated GPUs: refused programs are found first, and a failed capture leaves no trace."""

from __future__ import annotations

import gc
import threading
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from oracles import models

from specdec_fast import Engine, HuggingFaceTarget, SamplingParams, get_drafter
from specdec_fast.engine.cuda_graph.eligibility import MAX_FAILURES, RETRY_AFTER, CaptureFailures
from specdec_fast.engine.cuda_graph.step_program import Capacity
from specdec_kernels import simulated_gpu
from specdec_kernels.graph_capture import GraphPool, HostReadError, capture

pytestmark = [
    pytest.mark.aot,
    pytest.mark.filterwarnings("ignore::specdec_kernels.FallbackWarning"),  # results are computed on the CPU
]
FIRST, SECOND = torch.device("cuda:0"), torch.device("cuda:1")
FOREIGN = "operation would make the legacy stream depend on a capturing blocking stream"


class Counting:
    """A program that adds 1 to a number. It fails once its number of runs is `fails_at`."""

    def __init__(self, device: torch.device = FIRST, fails_at: int = 0) -> None:
        self.number = torch.zeros(1, device=device)
        self.runs, self.fails_at = 0, fails_at

    def __call__(self) -> None:
        self.runs += 1
        if self.runs == self.fails_at:
            raise RuntimeError(FOREIGN)
        self.number.add_(1)


def test_a_program_is_captured_and_replayed(gpu: simulated_gpu.Gpu) -> None:
    program = Counting()
    replay = capture(program, FIRST)
    assert program.runs == 3 and len(gpu.captures) == 1
    before = program.number.item()
    replay()
    assert program.number.item() == before + 1 and program.runs == 3
    assert gpu.captures[0].mode == "thread_local", "other threads may allocate memory"


@pytest.mark.parametrize("fails_at", [0, 3])
def test_no_finalizer_runs_while_a_program_is_captured(fails_at: int, gpu: simulated_gpu.Gpu) -> None:
    """Operations of a finalizer would be recorded, and run with every replay."""
    collecting: list[bool] = []

    class Watching(Counting):
        def __call__(self) -> None:
            collecting.append(gc.isenabled())
            super().__call__()

    with pytest.raises(RuntimeError, match=FOREIGN) if fails_at else nullcontext():
        capture(Watching(fails_at=fails_at), FIRST)
    assert collecting == [True, True, False] and gc.isenabled()


READS: dict[str, Any] = {
    "item": lambda x: x.sum().item(),
    "tolist": lambda x: x.tolist(),
    "bool": lambda x: bool(x[0] > 0),
    "nonzero": lambda x: x.nonzero(),
    "cpu": lambda x: x.cpu(),
    "tensor": lambda x: x + torch.tensor([1.0], device=x.device),
}


@pytest.mark.parametrize("deed", READS)
def test_a_program_that_reads_the_device_is_refused_before_its_capture(deed: str, gpu: simulated_gpu.Gpu) -> None:
    x = torch.ones(1, device=FIRST)
    stream = torch.cuda.current_stream(FIRST)

    def program() -> None:
        x.add_(1)
        READS[deed](x)

    with pytest.raises(HostReadError, match=rf"the step waits for the device: .*{deed}.* at test_capture\.py:\d+"):
        capture(program, FIRST)
    assert gpu.captures == [] and torch.cuda.current_stream(FIRST) == stream
    assert torch.cuda.get_sync_debug_mode() == 0
    replay = capture(Counting(), FIRST)
    replay()


def test_a_wait_that_does_not_come_again_forbids_nothing(gpu: simulated_gpu.Gpu) -> None:
    """A library that awakes, or code that is compiled, in the second run."""
    program = Counting()

    def waits_once() -> None:
        program()
        if program.runs == 2:
            program.number.item()

    capture(waits_once, FIRST)
    assert len(gpu.captures) == 1


@pytest.mark.parametrize("fails_at", [1, 2])
def test_what_a_failed_run_wrote_is_behind_what_comes_next(fails_at: int, gpu: simulated_gpu.Gpu) -> None:
    """The stream that was the current one waits for the warm-up, also where that raises."""
    joined: list[Any] = []
    with patch.object(torch.cuda.Stream, "wait_stream", lambda stream, other: joined.append((stream, other))):
        pool = GraphPool(FIRST)
        with pytest.raises(RuntimeError, match=FOREIGN):
            capture(Counting(fails_at=fails_at), FIRST, pool)
    before = torch.cuda.current_stream(FIRST)
    assert joined == [(pool.warm_up, before), (before, pool.warm_up)]
    assert pool.warm_up != pool.stream, "so that a workspace of a capture comes from the memory of its graph"


def test_other_threads_wait_as_they_like_while_a_program_is_tried(gpu: simulated_gpu.Gpu) -> None:
    """The debug mode of torch holds for all threads."""
    value, read = torch.ones(1, device=FIRST), []

    def other() -> None:
        read.append(value.item())

    def program() -> None:
        if torch.cuda.get_sync_debug_mode():
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()

    capture(program, FIRST)
    assert read == [1.0] and len(gpu.captures) == 1


@pytest.mark.parametrize("fails_at", [1, 2, 3])
def test_a_capture_that_fails_leaves_stream_and_allocator_as_they_were(fails_at: int, gpu: simulated_gpu.Gpu) -> None:
    pool, stream = GraphPool(FIRST), torch.cuda.current_stream(FIRST)
    with pytest.raises(RuntimeError, match=FOREIGN):
        capture(Counting(fails_at=fails_at), FIRST, pool)
    assert torch.cuda.current_stream(FIRST) == stream and gpu.capturing == [] and gpu.recording_pools == set()
    program = Counting()
    replay, before = capture(program, FIRST, pool), program.number.item()
    replay()
    assert program.number.item() == before + 1


def test_a_capture_that_cuda_ends_leaves_stream_and_allocator_as_they_were(gpu: simulated_gpu.Gpu) -> None:
    """Other code invalidates a capture, so no earlier run detects it; the end of the capture raises too."""
    pool, stream, program = GraphPool(FIRST), torch.cuda.current_stream(FIRST), Counting()

    def invalidated() -> None:
        program()
        for graph in gpu.capturing:
            graph.invalid = True

    with pytest.raises(RuntimeError, match="operation failed due to a previous error during capture"):
        capture(invalidated, FIRST, pool)
    assert torch.cuda.current_stream(FIRST) == stream and gpu.capturing == [] and gpu.recording_pools == set()
    replay, before = capture(program, FIRST, pool), program.number.item()
    replay()
    assert program.number.item() == before + 1


def test_every_device_is_captured_on_a_stream_of_its_own(gpu: simulated_gpu.Gpu) -> None:
    """torch has one default stream for captures, which belongs to the first device."""
    for device in (FIRST, SECOND, FIRST):
        torch.cuda.set_device(0)
        program = Counting(device)
        replay, before = capture(program, device), program.number.item()
        replay()
        assert program.number.item() == before + 1 and gpu.captures[-1].stream.device == device
        assert torch.cuda.current_device() == 0


# -- engines ----------------------------------------------------------------------------------------------------------


def target_on(device: torch.device, family: str = "llama") -> HuggingFaceTarget:
    return HuggingFaceTarget(models.own(family).to(device), max_length=128, max_rows=4)


PROMPTS = [models.prompt(5), models.prompt(17)]
PARAMS = [SamplingParams(temperature=0.8, seed=at, max_new_tokens=10 + at) for at in range(2)]


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    engine = Engine(HuggingFaceTarget(models.own("llama"), max_length=128, max_rows=4))
    return [handle.tokens for handle in engine.generate(PROMPTS, PARAMS)]


def test_engines_on_two_devices_capture_their_steps(gpu: simulated_gpu.Gpu, texts: list[list[int]]) -> None:
    for device in (FIRST, SECOND):
        engine = Engine(target_on(device))
        assert [handle.tokens for handle in engine.generate(PROMPTS, PARAMS)] == texts
        assert engine.step_mode == "graph" and gpu.captures[-1].stream.device == device


def test_a_model_that_asks_the_device_goes_on_uncaptured_and_says_what_asked(
    gpu: simulated_gpu.Gpu, texts: list[list[int]]
) -> None:
    target = target_on(FIRST)

    def ask(_module: Any, args: tuple[Any, ...]) -> None:
        bool(args[0].isnan().any())

    hook = target.layers[0].register_forward_pre_hook(lambda module, args: ask(module, args) if args else None)
    engine = Engine(target)
    assert [handle.tokens for handle in engine.generate(PROMPTS, PARAMS)] == texts
    explained = engine.explain()
    assert "steps sync: a CUDA-graph step failed: HostReadError: the step waits for the device: " in explained
    assert "Tensor.__bool__ at test_capture.py:" in explained and "next attempt" not in explained
    assert gpu.captures == []
    hook.remove()
    again = Engine(target)
    assert [handle.tokens for handle in again.generate(PROMPTS, PARAMS)] == texts
    assert again.step_mode == "graph" and len(gpu.captures) == 1


class FailingCaptures:
    """Captures fail while `left` is above 0, as they do when another program takes the memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, left: int) -> None:
        self.left, self.tried, record = left, 0, GraphPool.record

        def failing(pool: GraphPool, program: Any) -> Any:
            self.tried += 1
            if self.left:
                self.left -= 1
                raise torch.OutOfMemoryError("out of memory")
            return record(pool, program)

        monkeypatch.setattr(GraphPool, "record", failing)


def steps_of(engine: Engine, new_tokens: int) -> tuple[list[str], list[int]]:
    """The mode of every step of one request, and its text."""
    handle = engine.submit(PROMPTS[0], SamplingParams(temperature=0, max_new_tokens=new_tokens))
    modes = []
    while not handle.finished:
        modes.append(engine.step_mode)
        engine.step()
    return modes, handle.tokens


def test_a_capture_that_failed_for_reasons_of_others_is_tried_again(
    gpu: simulated_gpu.Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = Engine(HuggingFaceTarget(models.own("llama"), max_length=128, max_rows=4))
    expected = steps_of(want, 50)[1]
    FailingCaptures(monkeypatch, left=2)  # the second one is that which brings torch's generator back
    engine = Engine(target_on(FIRST))
    modes, text = steps_of(engine, 50)
    assert text == expected
    assert modes[:1] == ["graph"] and modes[1 : 1 + RETRY_AFTER] == ["sync"] * RETRY_AFTER
    assert set(modes[1 + RETRY_AFTER :]) == {"graph"} and engine.step_mode == "graph"
    assert "a CUDA-graph step failed: OutOfMemoryError: out of memory, but not since" in engine.explain()


def test_what_fails_three_times_is_not_tried_again(gpu: simulated_gpu.Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec_fast.engine.cuda_graph.eligibility.RETRY_AFTER", 2)
    failing = FailingCaptures(monkeypatch, left=1000)
    engine = Engine(target_on(FIRST))
    modes, _ = steps_of(engine, 30)
    assert failing.tried == 2 * MAX_FAILURES and modes.count("graph") == MAX_FAILURES
    assert engine.why_not_graph() == ["a CUDA-graph step failed: OutOfMemoryError: out of memory"]


def test_failures_are_forgiven_when_a_step_of_the_same_capacity_succeeds() -> None:
    failures, small, large = CaptureFailures(), Capacity(1, 1, True), Capacity(2, 1, True)
    for _ in range(MAX_FAILURES + 2):
        failures.record_failure(small, RuntimeError("busy"))
        assert failures.reason is not None and f"the next attempt is in {RETRY_AFTER} steps" in failures.reason
        for _ in range(RETRY_AFTER):
            failures.record_sync_step()
        assert failures.reason is None
        failures.record_success(small)
    for count in range(MAX_FAILURES):
        assert count == 0 or f"in {RETRY_AFTER << (count - 1)} steps" in str(failures.reason)
        failures.record_failure(small, RuntimeError("busy"))
        failures.record_success(large)
    assert failures.reason == "a CUDA-graph step failed: RuntimeError: busy"


def test_a_program_that_asks_the_device_is_not_tried_again() -> None:
    failures = CaptureFailures()
    message = failures.record_failure(None, HostReadError("the step waits for the device: item at model.py:3"))
    for _ in range(10 * RETRY_AFTER):
        failures.record_sync_step()
    assert message == f"{failures.reason}; steps run in sync mode from now on" and "item at model.py:3" in message


def test_a_program_serves_no_requests_that_ask_for_much_less_or_for_more(gpu: simulated_gpu.Gpu) -> None:
    small = HuggingFaceTarget(models.kin("llama").to(FIRST), max_length=128, max_rows=4)
    engine = Engine(target_on(FIRST), get_drafter("draft_model")(small, num_draft_tokens=3))
    for asked in (1, 9, None):
        engine.generate(PROMPTS[:1], PARAMS[:1], num_draft_tokens=asked)
    assert sorted(capacity.nodes for capacity in engine._graph_runner.capacities) == [2, 4, 10]


def test_programs_do_not_become_smaller_towards_the_end_of_a_text(gpu: simulated_gpu.Gpu) -> None:
    small = HuggingFaceTarget(models.kin("llama").to(FIRST), max_length=128, max_rows=4)
    engine = Engine(target_on(FIRST), get_drafter("draft_model")(small, num_draft_tokens=4))
    engine.generate(PROMPTS[:1], PARAMS[:1])
    assert engine.step_mode == "graph" and len(gpu.captures) == 1
