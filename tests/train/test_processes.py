"""Training in two processes: every step is one over both batches, and a run that was stopped goes on in both.

As a program this file is one of the processes: `torch.distributed.run test_processes.py FOLDER`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specdec_fast.heads.medusa import MedusaHeads
from specdec_fast.train.ahead import TAP, AheadTrainee
from specdec_fast.train.data import blocks
from specdec_fast.train.heads import Settings, TargetStates, fit
from specdec_fast.train.texts import split

SETTINGS = Settings(steps=5, batch=2, length=20, measure_every=5, saving=1e-9)


def beginning() -> tuple[AheadTrainee, TargetStates, np.ndarray, np.ndarray]:
    from oracles import models

    states = TargetStates(models.own("llama"), (TAP,))
    heads = MedusaHeads(64, 96, 2)
    source = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=source))
    row, held = split(np.random.default_rng(1).integers(1, 90, 700).astype(np.int32), SETTINGS.length)
    return AheadTrainee(heads, states), states, row, held


def one_of_them(folder: Path) -> None:
    for stop_after in (2, None):
        trainee, states, row, held = beginning()
        progress = fit(trainee, states, row, held, SETTINGS, folder, stop_after=stop_after)
        assert progress.step == (stop_after or SETTINGS.steps)
    told = {"history": progress.history, **trainee.heads.state_dict()}
    torch.save(told, folder / f"rank-{os.environ['RANK']}.pt")


def launch(folder: Path) -> list[dict[str, Any]]:
    """What each of two processes ended with."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    env = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    done = subprocess.run([*command, str(folder)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [torch.load(folder / f"rank-{rank}.pt") for rank in range(2)]


def test_two_processes_step_as_one(tmp_path: Path) -> None:
    first, second = launch(tmp_path)
    assert first["history"] == second["history"] and [each["step"] for each in first["history"]] == [0, 5]
    trainee, _, row, _ = beginning()
    optimiser = torch.optim.AdamW(trainee.parameters(), betas=SETTINGS.betas, weight_decay=0.0)
    for step in range(SETTINGS.steps):
        optimiser.param_groups[0]["lr"] = SETTINGS.rate(step)
        for rank in range(2):
            tokens = blocks(row, 2 * step + rank, SETTINGS.batch, SETTINGS.length, SETTINGS.seed)
            (trainee(tokens)[0] / 2).backward()
        torch.nn.utils.clip_grad_norm_(trainee.parameters(), SETTINGS.clip)
        optimiser.step()
        optimiser.zero_grad()
    for name, value in trainee.heads.state_dict().items():
        if value is not None:
            assert torch.equal(first[name], second[name]), name
            torch.testing.assert_close(first[name], value, atol=1e-5, rtol=1e-4)


if __name__ == "__main__":
    one_of_them(Path(sys.argv[1]))
