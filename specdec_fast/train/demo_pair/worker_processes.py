"""Trains one model in several single-threaded processes, which synchronise once per step.

With several threads, every small parallel region waits for its slowest thread. On a machine with other load, processes
are much faster.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class Team:
    """A process's place among `size` processes, each of which computes its share of every step."""

    rank: int = 0
    size: int = 1

    def share(self, count: int) -> range:
        """Returns the indices of `range(count)` for this process."""
        return range(self.rank, count, self.size)

    def wait(self) -> None:
        """Waits until all processes call it."""
        if self.size > 1:
            torch.distributed.barrier()

    def average(self, parameters: Iterable[nn.Parameter], *values: float) -> tuple[float, ...]:
        """Averages gradients, in place, and the given numbers over the processes; returns the numbers."""
        if self.size == 1:
            return values
        given = [p.grad for p in parameters if p.grad is not None]
        flat = torch.cat([grad.flatten() for grad in given] + [torch.tensor(values, dtype=torch.float32)])
        torch.distributed.all_reduce(flat)
        flat /= self.size
        at = 0
        for grad in given:
            grad.copy_(flat[at : at + grad.numel()].view_as(grad))
            at += grad.numel()
        return tuple(float(v) for v in flat[at:])


Stage = Callable[..., Any]  # (recipe, out, report, stop_after, team)


def _silent(*_: object) -> None:
    """Discards reports of processes other than the first."""


def _member(stage: Stage, recipe: Any, out: Path, stop_after: int | None, team: Team, meeting: str) -> None:
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process decides when to stop
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=team.rank, world_size=team.size)
    try:
        stage(recipe, out, _silent, stop_after, team)
    finally:
        torch.distributed.destroy_process_group()


def together(
    stage: Stage, recipe: Any, out: Path, report: Callable[..., None], stop_after: int | None, size: int
) -> Any:
    """Runs a stage in `size` processes, with this one as the first; returns its result."""
    if size == 1:
        return stage(recipe, out, report, stop_after, Team())
    handle, name = tempfile.mkstemp(prefix="meeting-", dir=out)
    os.close(handle)
    os.unlink(name)
    meeting = f"file://{Path(name).resolve()}"
    context = multiprocessing.get_context("spawn")
    others = [
        context.Process(target=_member, args=(stage, recipe, out, stop_after, Team(rank, size), meeting), daemon=True)
        for rank in range(1, size)
    ]
    threads = torch.get_num_threads()
    try:
        for process in others:
            process.start()
        torch.set_num_threads(1)
        torch.distributed.init_process_group("gloo", init_method=meeting, rank=0, world_size=size)
        result = stage(recipe, out, report, stop_after, Team(0, size))
        for process in others:
            process.join(60)
        return result
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        for process in others:
            if process.is_alive():
                process.terminate()
        torch.set_num_threads(threads)
        Path(name).unlink(missing_ok=True)
