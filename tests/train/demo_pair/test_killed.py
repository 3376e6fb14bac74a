"""A kill at any moment of writing checkpoints, and another one in the life after it: no whole checkpoint is ever lost.

The processes die between any two changes to the file system, or with a file half written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from specdec_fast.train.heads.run_checkpoint import RUN_FILE, load_checkpoint, read_stored_step, save_checkpoint

PARTS = ("model.safetensors", "optimizer.bin", "random_states_0.pkl")


class Killed(BaseException):
    """The process is gone."""


class Accelerator:
    """Stores its step in several files, one after another."""

    is_main_process = True

    def __init__(self, step: int = 0) -> None:
        self.step = step

    def wait_for_everyone(self) -> None:
        pass

    def save_state(self, folder: str) -> None:
        Path(folder).mkdir(parents=True)
        for part in PARTS:
            (Path(folder) / part).write_text(f"step {self.step}")

    def load_state(self, folder: str) -> None:
        found = {(Path(folder) / part).read_text() for part in PARTS}
        if len(found) != 1 or not found.copy().pop().startswith("step "):
            raise RuntimeError(f"parts of {found}")
        self.step = int(found.pop().removeprefix("step "))


@contextmanager
def life(deeds: int | None) -> Iterator[list[str]]:
    """Ends at a change to the file system once there were so many; a write that it ends at leaves half a file. What was
    done.
    """
    done: list[str] = []
    write = Path.write_text

    def change(name: str, deed: Callable[..., Any], half: Callable[..., Any] | None = None) -> Callable[..., Any]:
        def made(*args: Any, **kwargs: Any) -> Any:
            if len(done) == deeds:
                if half is not None:
                    half(*args)
                raise Killed
            done.append(name)
            return deed(*args, **kwargs)

        return made

    def half(path: Path, text: str) -> None:
        write(path, text[: len(text) // 2])

    changes = {name: change(name, getattr(os, name)) for name in ("rename", "unlink", "rmdir", "mkdir")}
    with patch.multiple(os, **changes), patch.object(Path, "write_text", change("write", write, half)):
        yield done


def lived(folder: Path, steps: int, deeds: int | None = None) -> tuple[int, int, list[str]]:
    """Go on from the folder and save behind each of so many steps, or until the kill: the step that was found, the
    last one that was saved, and what was done.
    """
    process = Accelerator()
    with life(deeds) as done:
        load_checkpoint(process, folder)
        found = saved = process.step
        assert read_stored_step(folder) == found
        try:
            for _ in range(steps):
                process.step += 1
                save_checkpoint(process, folder, {"step": process.step})
                saved = process.step
        except Killed:
            pass
    return found, saved, done


def test_a_kill_while_a_checkpoint_is_written_loses_the_step_under_way_at_most(tmp_path: Path) -> None:
    """And so does one that comes when the run has gone on from what that left."""
    _, saved, done = lived(tmp_path / "whole", 2)
    assert saved == 2 and set(done) == {"mkdir", "write", "rename", "unlink", "rmdir"}
    cases = 0
    for first in range(len(done)):
        for second in range(len(done)):
            folder = tmp_path / f"{first}-{second}"
            folder.mkdir()
            _, before, _ = lived(folder, 2, first)
            found, after, _ = lived(folder, 1, second)
            assert found >= before, (first, second)
            last, _, _ = lived(folder, 0)
            assert last >= after, (first, second)
            cases += 1
    assert cases > 300


def test_what_a_process_finds_is_whole_or_named(tmp_path: Path) -> None:
    """Half a file under the name of a checkpoint, as a full disk leaves one, is an error and not a fresh start."""
    lived(tmp_path, 2)
    run = tmp_path / "checkpoint" / RUN_FILE
    run.write_text(json.dumps({"step": 2})[:5])
    with pytest.raises(ValueError, match="checkpoint: the checkpoint is damaged or has other settings"):
        lived(tmp_path, 1)
