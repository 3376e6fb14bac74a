"""The training loop of all stages: budget, schedule, atomic checkpoints, progress."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specdec_fast.train.demo_pair.muon import MuonWithAdamW
from specdec_fast.train.demo_pair.worker_processes import Team

# (step, progress in [0, 1)) -> pairs of a scalar loss, weighted for this process's step, and its number of tokens
Losses = Callable[[int, float], Iterator[tuple[Tensor, int]]]
# (stage, progress, mean loss, tokens, tokens per second, seconds left)
Report = Callable[[str, float, float, int, float, float], None]


@dataclass(frozen=True, slots=True)
class Budget:
    """Length of a stage in tokens or seconds; with both, the first limit that is reached ends it."""

    tokens: int | None = None
    seconds: float | None = None

    def progress(self, tokens: int, seconds: float) -> float:
        """Returns the used share of the budget; 1 or more if the stage is done."""
        shares = [0.0]
        if self.tokens is not None:
            shares.append(tokens / max(self.tokens, 1))
        if self.seconds is not None:
            shares.append(seconds / max(self.seconds, 1e-9))
        return max(shares)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Factor on the learning rate: a linear warm-up, then a linear change from `first` to `last`.

    The last stage ends at zero.

    Source:
        Bergsma et al. 2025 (arXiv:2502.15938) for the decay to zero.
    """

    first: float = 1.0
    last: float = 0.0
    warm_up: float = 0.02

    def __call__(self, progress: float) -> float:
        """Returns the factor at a share of the budget."""
        if progress < self.warm_up:
            return self.first * (progress + 1e-3) / (self.warm_up + 1e-3)
        done = min((progress - self.warm_up) / (1.0 - self.warm_up), 1.0)
        return self.first + (self.last - self.first) * done


def save_atomically(value: Any, path: Path) -> None:
    """Saves a value with torch.save under another name and renames the file, so that a kill leaves no partial file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(path.suffix + ".partial")
    torch.save(value, partial)
    os.replace(partial, path)


@contextmanager
def held_interrupt(note: str = "") -> Iterator[list[bool]]:
    """Delays SIGINT and SIGTERM, so that no step ends halfway. A second signal raises KeyboardInterrupt at once.

    Args:
        note: Text for standard error at the first signal.

    Yields:
        A list whose only entry becomes True with the first signal.
    """
    flag = [False]
    if threading.current_thread() is not threading.main_thread():
        yield flag
        return

    def hold(number: int, frame: Any) -> None:
        if flag[0]:
            raise KeyboardInterrupt
        flag[0] = True
        if note:
            with suppress(OSError):  # print may be under way, and cannot be entered again
                os.write(2, note.encode())

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number, handler in before.items():
        if handler not in (signal.SIG_IGN, None):  # None: a handler that was not set from Python stays
            signal.signal(number, hold)
    try:
        yield flag
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)


@dataclass(slots=True)
class Progress:
    """Progress of a stage, stored in its checkpoint."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    loss: float = float("nan")
    done: bool = False


def _seconds_left(budget: Budget, at: Progress, since: tuple[float, int], now: float) -> float:
    """Returns the remaining seconds of a stage; NaN if only tokens end it and no step after the first is measured.

    Args:
        budget: Length of the stage.
        at: Progress of the stage.
        since: Time and tokens after the first step of this call.
        now: The time.
    """
    found = []
    if budget.seconds is not None:
        found.append(max(budget.seconds - at.seconds, 0.0))
    if budget.tokens is not None and at.tokens > since[1]:
        found.append(max(budget.tokens - at.tokens, 0) * (now - since[0]) / (at.tokens - since[1]))
    return min(found, default=float("nan"))


def fit(
    stage: str,
    model: nn.Module,
    losses: Losses,
    budget: Budget,
    checkpoint: Path,
    report: Report,
    *,
    schedule: Schedule = Schedule(),
    muon_lr: float = 0.008,
    adam_lr: float = 2e-3,
    save_every: float = 120.0,
    clip: float = 1.0,
    bfloat16: bool = False,
    stop_after: int | None = None,
    team: Team = Team(),
) -> Progress:
    """Trains a model until the budget is used up, and continues from the checkpoint if it exists.

    The data of a step depends on its number only. With a budget in tokens, an interrupted run therefore ends with the
    same weights as one without interruption.

    Args:
        stage: Name of the stage, for reports.
        model: The model, which is changed in place.
        losses: Yields the losses of a step.
        budget: Length of the stage.
        checkpoint: File of the checkpoint.
        report: Called after every step.
        schedule: Factor on the learning rates.
        muon_lr: Peak learning rate of Muon.
        adam_lr: Peak learning rate of AdamW.
        save_every: Seconds between checkpoints.
        clip: Largest norm of the gradient.
        bfloat16: Orthogonalise in bfloat16.
        stop_after: Ends this call after that many steps, with a checkpoint (for tests).
        team: This process's place among the training processes.

    Returns:
        The progress of the stage.

    Raises:
        KeyboardInterrupt: After Ctrl-C, once a checkpoint is written.
    """
    at = Progress()
    optimiser = MuonWithAdamW(model.named_parameters(), muon_lr=muon_lr, adam_lr=adam_lr, bfloat16=bfloat16)
    if checkpoint.exists():
        stored = torch.load(checkpoint, map_location="cpu", weights_only=True)
        model.load_state_dict(stored["model"])
        at = Progress(**stored["progress"])
        if at.done:
            return at
        optimiser.load_state_dict(stored["optimiser"])
        for group in optimiser.param_groups:  # the rates of this call apply, not those of the checkpoint
            group["peak"] = muon_lr if group["kind"] == "muon" else adam_lr

    def save() -> None:
        if team.rank == 0:
            save_atomically(
                {
                    "model": model.state_dict(),
                    "progress": asdict(at),
                    **({} if at.done else {"optimiser": optimiser.state_dict()}),
                },
                checkpoint,
            )

    started, before = time.monotonic(), at.seconds
    saved, first_step, first_tokens = started, at.step, at.tokens
    steady: tuple[float, int] | None = None  # time and tokens after the first step, which compiles
    with held_interrupt() as stop:
        while (share := budget.progress(at.tokens, at.seconds)) < 1.0:
            optimiser.scale = schedule(share)
            optimiser.zero_grad(set_to_none=True)
            total, covered = 0.0, 0
            for loss, tokens in losses(at.step, share):
                loss.backward()
                total += float(loss.detach())
                covered += tokens
            # processes agree on the time, so that they follow one schedule
            total, seconds = team.average(model.parameters(), total, before + time.monotonic() - started)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimiser.step()
            at.step, at.tokens, at.seconds = at.step + 1, at.tokens + covered * team.size, seconds
            at.loss = total if at.loss != at.loss else 0.95 * at.loss + 0.05 * total
            share, now = budget.progress(at.tokens, at.seconds), time.monotonic()
            steady = steady or (now, at.tokens)
            report(
                stage,
                min(share, 1.0),
                at.loss,
                at.tokens,
                (at.tokens - first_tokens) / max(now - started, 1e-9),
                _seconds_left(budget, at, steady, time.monotonic()),
            )
            if stop[0] or (stop_after is not None and at.step - first_step >= stop_after):
                save()
                if stop[0]:
                    raise KeyboardInterrupt
                return at
            if now - saved > save_every:
                save()
                saved = now
    at.done = True
    save()
    return at
