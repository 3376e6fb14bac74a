"""Several single-threaded processes that train one model: they meet once per step instead of once per
operation.

On a machine that is also used for other things this is much faster than one process with several threads,
whose every small parallel region waits for its slowest thread.
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
    """A member's place among ``size`` processes that each take their share of every step."""

    rank: int = 0
    size: int = 1

    def share(self, count: int) -> range:
        """Indices out of ``range(count)`` this member works on."""
        return range(self.rank, count, self.size)

    def wait(self) -> None:
        """Return when every member is here."""
        if self.size > 1:
            torch.distributed.barrier()

    def average(self, parameters: Iterable[nn.Parameter], *values: float) -> tuple[float, ...]:
        """Average all gradients in place, and the given numbers, over the members."""
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
    """A member other than the first reports nothing."""


def _member(stage: Stage, recipe: Any, out: Path, stop_after: int | None, team: Team, meeting: str) -> None:
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first member decides when to stop
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=team.rank, world_size=team.size)
    try:
        stage(recipe, out, _silent, stop_after, team)
    finally:
        torch.distributed.destroy_process_group()


def together(
    stage: Stage, recipe: Any, out: Path, report: Callable[..., None], stop_after: int | None, size: int
) -> Any:
    """Run a stage with ``size`` members, this process the first of them; its result. Size 1 runs it plainly."""
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
