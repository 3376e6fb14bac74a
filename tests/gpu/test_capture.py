"""CUDA-graph capture on a GPU: a failed capture leaves the process unchanged, and later engines capture their steps.

The twin of tests/launch/test_capture.py, which runs the same on a simulated GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracles import models

from specdec_fast import Engine, HuggingFaceTarget, SamplingParams, get_drafter
from specdec_kernels.graph_capture import GraphPool, HostReadError, capture

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
PROMPTS = [models.prompt(5), models.prompt(17)]
PARAMS = [SamplingParams(temperature=0.8, seed=at, max_new_tokens=20 + at) for at in range(2)]


def target() -> HuggingFaceTarget:
    return HuggingFaceTarget(models.own("llama").cuda(), max_length=128, max_rows=4)


def texts_of(engine: Engine) -> list[list[int]]:
    return [handle.tokens for handle in engine.generate(PROMPTS, PARAMS)]


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    return texts_of(Engine(target(), step_mode="sync"))


def check_sound(texts: list[list[int]]) -> None:
    """Streams, memory and random numbers work, and a new engine captures its steps."""
    assert torch.cuda.current_stream() == torch.cuda.default_stream() and not torch.cuda.is_current_stream_capturing()
    assert torch.rand(8, device="cuda").add(torch.zeros(1 << 20, device="cuda").sum()).isfinite().all()
    engine = Engine(target())
    assert texts_of(engine) == texts and engine.step_mode == "graph", engine.explain()


def test_a_model_that_reads_the_device_continues_in_sync_mode(texts: list[list[int]]) -> None:
    asks = target()

    def ask(_module: Any, args: tuple[Any, ...]) -> None:
        bool(args[0].isnan().any())

    hook = asks.layers[0].register_forward_pre_hook(lambda module, args: ask(module, args) if args else None)
    engine = Engine(asks)
    assert texts_of(engine) == texts
    assert "HostReadError: the step waits for the device: " in engine.explain()
    assert "Tensor.__bool__ at test_capture.py:" in engine.explain()
    hook.remove()
    check_sound(texts)


READS = {
    "item": lambda x: x.sum().item(),
    "tolist": lambda x: x.tolist(),
    "nonzero": lambda x: x.nonzero(),
    "cpu": lambda x: x.cpu(),
}


@pytest.mark.parametrize("deed", READS)
def test_a_program_that_reads_the_device_is_refused_before_its_capture(deed: str) -> None:
    x, mode = torch.ones(1, device="cuda"), torch.cuda.get_sync_debug_mode()
    with pytest.raises(HostReadError, match=rf"{deed}.* at test_capture\.py:\d+"):
        capture(lambda: READS[deed](x), x.device)
    assert torch.cuda.get_sync_debug_mode() == mode


@pytest.mark.parametrize("fault", ["of the program", "of CUDA"])
def test_a_capture_that_fails_leaves_nothing_behind(fault: str, texts: list[list[int]]) -> None:
    """The second run of these programs succeeds, so that only their capture fails."""
    x, runs = torch.zeros(1, device="cuda"), [0]

    def program() -> None:
        runs[0] += 1
        x.add_(torch.zeros(1, device="cuda"))
        if runs[0] == 3:
            if fault == "of CUDA":
                torch.cuda.synchronize()
            raise RuntimeError("on purpose")

    pool = GraphPool(x.device)
    with pytest.raises(RuntimeError):
        capture(program, x.device, pool)

    def add() -> None:
        x.add_(1)

    replay, before = capture(add, x.device, pool), float(x)
    replay()
    assert float(x) == before + 1
    check_sound(texts)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_engines_on_two_devices_capture_their_steps(texts: list[list[int]]) -> None:
    for device in ("cuda:0", "cuda:1"):
        engine = Engine(HuggingFaceTarget(models.own("llama").to(device), max_length=128, max_rows=4))
        assert texts_of(engine) == texts and engine.step_mode == "graph", engine.explain()


def test_nothing_is_captured_after_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    small = HuggingFaceTarget(models.kin("llama").cuda(), max_length=128, max_rows=4)
    engine = Engine(target(), get_drafter("draft_model")(small, num_draft_tokens=3))
    engine.warm()
    made, record = [0], GraphPool.record

    def counting(pool: GraphPool, program: Any) -> Any:
        made[0] += 1
        return record(pool, program)

    monkeypatch.setattr(GraphPool, "record", counting)
    for rows in range(1, 5):
        for asked in range(4):
            engine.generate([models.prompt(3 + at) for at in range(rows)], PARAMS[0], num_draft_tokens=asked)
    assert engine.step_mode == "graph" and made == [0], engine.explain()
