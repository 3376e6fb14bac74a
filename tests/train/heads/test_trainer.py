"""The training loop: interrupted runs continue exactly, other settings are refused, rates and settings are checked."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from itertools import count as count_up
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from oracles.small_heads import row_of, some_heads, tiny

from specdec_fast.heads.medusa import MedusaHeads
from specdec_fast.train.heads import trainer as loop
from specdec_fast.train.heads.parallel import ParallelHeadsTrainee
from specdec_fast.train.heads.trainer import Settings, fit
from specdec_fast.train.heads.training_texts import split


def run(
    folder: Path, stop_after: int | None = None, facts: dict[str, Any] | None = None, **changes: Any
) -> tuple[Any, MedusaHeads]:
    model, states = tiny()
    heads = some_heads(model)
    settings = Settings(**{"steps": 9, "batch": 2, "length": 24, "measure_every": 4, "saving": 1e-9, **changes})
    row, held = split(row_of(1500), 24)
    options: dict[str, Any] = {"facts": facts or {}, "stop_after": stop_after}
    return fit(ParallelHeadsTrainee(heads, states), states, row, held, settings, folder, **options), heads


def test_a_run_that_was_cut_off_ends_as_one_that_was_not(tmp_path: Path) -> None:
    whole, want = run(tmp_path / "whole")
    for _ in range(2):
        progress, _ = run(tmp_path / "cut", stop_after=3)
        assert not (tmp_path / "cut" / "checkpoint.partial").exists()
    shutil.move(tmp_path / "cut" / "checkpoint", tmp_path / "cut" / "checkpoint.old")  # killed between two renames
    (tmp_path / "cut" / "checkpoint.partial").mkdir()
    assert progress.step == 6
    progress, found = run(tmp_path / "cut")
    assert progress.step == 9 and [each["step"] for each in progress.history] == [0, 4, 8, 9]
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), want.parameters(), strict=True))
    assert progress.history == whole.history
    again, same = run(tmp_path / "cut")
    assert again.step == 9 and torch.equal(same.weight, found.weight), "nothing is left to do"


@pytest.mark.parametrize(("seconds", "count"), [(0.0, 9), (0.4, 2)])
def test_cheap_checkpoints_are_written_behind_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, count: int
) -> None:
    """Dear ones behind the first and the last. Time is counted here, so that no other program has a part in it."""
    written: list[int] = []
    ticks = count_up()
    clock = SimpleNamespace(monotonic=lambda: next(ticks) / 1000 + seconds * len(written))
    monkeypatch.setattr(loop, "time", clock)
    monkeypatch.setattr(loop, "save_checkpoint", lambda accelerator, folder, identity: written.append(identity["step"]))
    run(tmp_path, saving=None)
    assert len(written) == count and written[0] == 1 and written[-1] == 9


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_behind_a_whole_step(tmp_path: Path, number: int) -> None:
    """Nothing is lost, however seldom checkpoints are written."""
    before = signal.getsignal(number)
    model, states = tiny()
    row, held = split(row_of(1500), 24)
    settings = Settings(steps=9, batch=2, length=24, saving=1e-9)
    seen: list[float] = []

    def stop_at_three(share: float, found: Any, left: float) -> None:
        seen.append(share)
        if len(seen) == 3:
            os.kill(os.getpid(), number)

    with pytest.raises(KeyboardInterrupt):
        fit(ParallelHeadsTrainee(some_heads(model), states), states, row, held, settings, tmp_path, stop_at_three)
    assert len(seen) == 4, "the step that was under way is whole"
    progress = fit(ParallelHeadsTrainee(some_heads(model), states), states, row, held, settings, tmp_path, stop_after=1)
    assert progress.step == 5 and signal.getsignal(number) == before


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("begun")
    run(folder, stop_after=2, facts={"inputs": ["a.txt"]})
    return folder


@pytest.mark.parametrize(
    "changes",
    [{"length": 23}, {"batch": 3}, {"seed": 1}, {"steps": 8}, {"lr": 2e-3}, {"facts": {"inputs": ["b.txt"]}}],
    ids=str,
)
def test_a_run_does_not_continue_with_other_settings(begun: Path, changes: dict[str, Any]) -> None:
    before = {path: path.read_bytes() for path in begun.rglob("*.*")}
    name, value = next(iter(changes.get("facts", changes).items()))
    words = rf"checkpoint: {name} differs from the run in it: got {re.escape(repr(value))}; expected .*; continue with"
    with pytest.raises(ValueError, match=words):
        run(begun, **{"facts": {"inputs": ["a.txt"]}, **changes})
    assert before and before == {path: path.read_bytes() for path in begun.rglob("*.*")}, "it can still go on"


def test_a_run_does_not_continue_with_another_number_of_processes(tmp_path: Path) -> None:
    """Every process has its own blocks in each step, so that others would be another run."""
    run(tmp_path, stop_after=2)
    place = tmp_path / "checkpoint" / "run.json"
    made_of = json.loads(place.read_text())
    place.write_text(json.dumps({**made_of, "number of processes": 4}))
    with pytest.raises(ValueError, match="number of processes differs from the run in it: got 1; expected 4; "):
        run(tmp_path)
    place.write_text(json.dumps(made_of))
    progress, _ = run(tmp_path, measure_every=3, saving=0.5)
    assert progress.step == 9, "how often is measured and saved may change"


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    run(tmp_path, stop_after=1)
    weights = tmp_path / "checkpoint" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"the checkpoint is damaged or has other settings.*remove it to start"):
        run(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "training steps: got 0; expected at least 1"),
        ({"lr": 0.0}, "training lr, warm_up, saving: got 0.0"),
        ({"mixed_precision": "int4"}, "mixed_precision: got 'int4'; expected one of no, bf16, fp16"),
    ],
)
def test_bad_options(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings(**changes)


def test_the_rate_warms_up_and_falls_to_zero() -> None:
    settings = Settings(steps=100, lr=1.0, warm_up=0.1)
    rates = [settings.rate(step) for step in range(101)]
    assert rates[:10] == sorted(rates[:10]) and rates[10] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True) and rates[100] == pytest.approx(0, abs=1e-9)
