"""Checkpoints of a training run: an atomic write, a resume, and a check that the run is the same.

Tests: tests/train/heads/test_trainer.py, tests/train/demo_pair/test_killed.py.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from specdec_fast.train.heads.settings import Settings

RUN_FILE = "run.json"
"""File of a checkpoint with the run's identity and its step."""
_CHANGEABLE = ("measure_every", "saving")
"""Settings that do not affect the weights: a run may continue with other values."""


def run_identity(settings: Settings, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns everything that determines the run's weights, as JSON restores it."""
    fixed = {name: value for name, value in asdict(settings).items() if name not in _CHANGEABLE}
    identity: dict[str, Any] = json.loads(json.dumps({**fixed, **facts}))
    return identity


def with_process_count(facts: Mapping[str, Any], accelerator: Any) -> dict[str, Any]:
    """Adds the number of processes to the facts of a run, because its batches depend on that number."""
    return {**facts, "number of processes": int(accelerator.num_processes)}


def read_stored_step(folder: Path) -> int:
    """Returns the step of the checkpoint in `folder`; 0 if there is none that can be read."""
    for place in _checkpoint_folders(folder):
        if place.is_dir():
            try:
                return int(json.loads((place / RUN_FILE).read_text())["step"])
            except (OSError, ValueError, KeyError, TypeError):
                break
    return 0


def check_same_run(folder: Path, settings: Settings, facts: Mapping[str, Any]) -> None:
    """Checks that the checkpoint in `folder` belongs to a run with these settings and facts.

    They determine batches, learning rates and the split into training and held-out text. A run that continued with
    others would be measured on text that it was trained on.

    Args:
        folder: Folder of the run; it need not contain a checkpoint.
        settings: Settings of this call.
        facts: Facts of this call, with the number of processes.

    Raises:
        ValueError: If a setting or fact differs.
    """
    place = next((place for place in _checkpoint_folders(folder) if place.is_dir()), None)
    if place is None:
        return
    try:
        stored = json.loads((place / RUN_FILE).read_text())
    except (OSError, ValueError):
        return  # damaged: `load_checkpoint` reports it
    for name, want in run_identity(settings, facts).items():
        if stored.get(name) != want:
            raise ValueError(
                f"{place}: {name} differs from the run in it: got {want!r}; expected {stored.get(name)!r}; continue "
                f"with that value, train into another --out, or remove {place} to start again"
            )


def _checkpoint_folders(folder: Path) -> tuple[Path, Path]:
    """Returns the folders that may contain a complete checkpoint, the newer one first."""
    return folder / "checkpoint", folder / "checkpoint.old"


def save_checkpoint(accelerator: Any, folder: Path, identity: Mapping[str, Any]) -> None:
    """Writes a checkpoint under another name and renames it, so that a kill always leaves a complete one.

    Args:
        accelerator: The accelerator that holds the training state.
        folder: Folder of the run.
        identity: Result of `run_identity` with the number of the step.
    """
    new, (here, old) = folder / "checkpoint.partial", _checkpoint_folders(folder)
    if accelerator.is_main_process:
        shutil.rmtree(new, ignore_errors=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(new))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        (new / RUN_FILE).write_text(json.dumps(identity))
        if here.exists():  # else the older one is all there is until the new one has its name
            shutil.rmtree(old, ignore_errors=True)
            here.rename(old)
        new.rename(here)
        shutil.rmtree(old, ignore_errors=True)
    accelerator.wait_for_everyone()


@contextmanager
def replaced_folder(place: Path) -> Iterator[Path]:
    """Replaces a folder as a whole: a folder of another name is filled first, and an error leaves the old one.

    Args:
        place: The folder, which need not exist.

    Yields:
        An empty folder to fill.
    """
    new, old = place.with_name(f"{place.name}.partial"), place.with_name(f"{place.name}.old")
    if old.exists() and not place.exists():  # an earlier program ended between the two renames
        old.rename(place)
    for each in (new, old):
        shutil.rmtree(each, ignore_errors=True)
    new.mkdir(parents=True)
    yield new
    if place.exists():
        place.rename(old)
    new.rename(place)
    shutil.rmtree(old, ignore_errors=True)


def restore_trainee(folder: Path, trainee: Any) -> int:
    """Loads the weights of the last checkpoint into a trainee, without the state of the optimiser.

    Args:
        folder: Folder of the run.
        trainee: The trainee.

    Returns:
        The step of the checkpoint; 0 if there is none that can be read.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    for place in _checkpoint_folders(folder):
        if place.is_dir():
            try:
                tensors = load_file(place / "model.safetensors")
                trainee.load_state_dict({name.removeprefix("module."): value for name, value in tensors.items()})
            except (RuntimeError, OSError, SafetensorError):
                return 0
            return read_stored_step(folder)
    return 0


def load_checkpoint(accelerator: Any, folder: Path) -> None:
    """Restores the training state from the checkpoint in `folder`, if there is one.

    Raises:
        ValueError: If the checkpoint is damaged, or belongs to modules of other shapes.
    """
    from safetensors import SafetensorError

    for place in _checkpoint_folders(folder):
        if place.is_dir():
            try:
                json.loads((place / RUN_FILE).read_text())
                accelerator.load_state(str(place))
            except (
                RuntimeError,
                ValueError,
                LookupError,
                OSError,
                EOFError,
                UnpicklingError,
                SafetensorError,
            ) as error:
                reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                raise ValueError(
                    f"{place}: the checkpoint is damaged or has other settings: {reason}; train into another --out, or "
                    "remove it to start again"
                ) from None
            return
