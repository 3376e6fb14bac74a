"""Training in two processes of `accelerate launch`: every step is one over both batches, and a run that was stopped
goes on in both; processes that do not see one work folder say so.

As a program this file is one of the processes: `accelerate launch test_processes.py FOLDER`. One launch serves all
tests, because two processes that begin cost more than all that they do. The launcher is a fork of the tests' process,
which spares it the imports.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specdec_fast.heads.medusa import MedusaHeads
from specdec_fast.train.heads.parallel import AUX_HIDDEN_STATE, ParallelHeadsTrainee
from specdec_fast.train.heads.parallel_command import check_shared_folder
from specdec_fast.train.heads.recurrent import Eagle3Trainee, EagleTrainee, new_eagle, new_eagle3
from specdec_fast.train.heads.settings import Settings
from specdec_fast.train.heads.target_states import TargetStates
from specdec_fast.train.heads.trainer import create_accelerator, fit
from specdec_fast.train.heads.training_texts import split
from specdec_fast.train.token_batches import blocks

SETTINGS = Settings(steps=5, batch=2, length=20, measure_every=5, saving=1e-9)
KINDS = ("medusa", "eagle", "eagle3")


def beginning(kind: str) -> tuple[Any, np.ndarray, np.ndarray]:
    """A trainee with the same weights in every process, training and held-out tokens."""
    from oracles import models

    model = models.own("llama")
    trainee: Any
    if kind == "medusa":
        trainee = ParallelHeadsTrainee(MedusaHeads(64, 96, 2), TargetStates(model, (AUX_HIDDEN_STATE,)))
    elif kind == "eagle":  # noise comes from the generator of each process
        trainee = EagleTrainee(new_eagle(model), TargetStates(model, (AUX_HIDDEN_STATE,)), noise=0.0, ahead=2)
    else:
        states = TargetStates(model, ("entering:0", "entering:1", AUX_HIDDEN_STATE))
        trainee = Eagle3Trainee(new_eagle3(model, torch.arange(0, 96, 2), [0, 1, 1]), states, ahead=2)
    source = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in trainee.parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=source))
    row, held = split(np.random.default_rng(1).integers(1, 90, 700).astype(np.int32), SETTINGS.length)
    return trainee, row, held


def one_of_them(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    results: dict[str, Any] = {}
    for kind in KINDS:
        for stop_after in (2, None):
            trainee, row, held = beginning(kind)
            progress = fit(trainee, trainee.states, row, held, SETTINGS, folder / kind, stop_after=stop_after)
            assert progress.step == (stop_after or SETTINGS.steps)
        results[kind] = {"history": progress.history, **trainee.state_dict()}
    accelerator = create_accelerator(SETTINGS)
    check_shared_folder(accelerator, folder / "shared")
    try:
        check_shared_folder(accelerator, folder / f"of-{rank}")
    except ValueError as error:
        results["apart"] = str(error)
    results["left"] = [path.name for path in (folder / "shared").iterdir()]
    torch.save(results, folder / f"rank-{rank}.pt")


def launched(arguments: list[str], said: Path) -> None:
    """Runs `accelerate launch ARGUMENTS`, with all output in a file."""
    from accelerate.commands.launch import launch_command, launch_command_parser

    with said.open("w") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    paths = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    os.environ.update(ACCELERATE_USE_CPU="true", OMP_NUM_THREADS="1", PYTHONPATH=paths)
    launch_command(launch_command_parser().parse_args(arguments))


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes ended with."""
    folder = tmp_path_factory.mktemp("processes")
    how = ["--multi_gpu", "--num_processes=2", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]
    arguments = [*how, "--main_process_port=0", __file__, str(folder)]
    launch = multiprocessing.get_context("fork").Process(target=launched, args=(arguments, folder / "said"))
    launch.start()
    launch.join()
    assert launch.exitcode == 0, (folder / "said").read_text()
    return [torch.load(folder / f"rank-{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_step_as_one(kind: str, ended: list[dict[str, Any]]) -> None:
    """EAGLE heads too: they run their layer several times a step, and every parameter must have its gradient."""
    first, second = (each[kind] for each in ended)
    assert first["history"] == second["history"] and [each["step"] for each in first["history"]] == [0, 5]
    trainee, row, _ = beginning(kind)
    optimiser = torch.optim.AdamW(trainee.parameters(), betas=SETTINGS.betas, weight_decay=0.0)
    for step in range(SETTINGS.steps):
        optimiser.param_groups[0]["lr"] = SETTINGS.rate(step)
        for rank in range(2):
            tokens = blocks(row, 2 * step + rank, SETTINGS.batch, SETTINGS.length, SETTINGS.seed)
            (trainee(tokens)[0] / 2).backward()
        torch.nn.utils.clip_grad_norm_(trainee.parameters(), SETTINGS.clip)
        optimiser.step()
        optimiser.zero_grad()
    for name, value in trainee.state_dict().items():
        if value is not None:
            assert torch.equal(first[name], second[name]), name
            torch.testing.assert_close(first[name], value, atol=1e-5, rtol=1e-4)


def test_processes_that_see_different_work_folders_are_refused(ended: list[dict[str, Any]]) -> None:
    """All of them stop and none waits for the others; folders that all of them see are left as they were."""
    for each in ended:
        assert each["apart"].startswith("--out: 1 of 2 processes see the folder ")
        assert each["left"] == []


if __name__ == "__main__":
    one_of_them(Path(sys.argv[1]))
