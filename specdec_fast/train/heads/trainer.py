"""The training loop of heads over a frozen target: accelerate, checkpoints that survive a kill, curves.

The loop knows no architecture. A trainee is a module whose forward pass takes a batch of tokens and returns its loss.
Tests: tests/train/heads/test_trainer.py.
"""

from __future__ import annotations

import atexit
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import nn

from specdec_fast.extras import require
from specdec_fast.train.demo_pair.training_loop import held_interrupt
from specdec_fast.train.heads.run_checkpoint import (
    check_same_run,
    load_checkpoint,
    run_identity,
    save_checkpoint,
    with_process_count,
)
from specdec_fast.train.heads.settings import Progress, Settings
from specdec_fast.train.heads.target_states import TargetStates
from specdec_fast.train.heads.time_left import TimeLeft
from specdec_fast.train.token_batches import blocks, cut_block

log = logging.getLogger("specdec_fast")

Report = Callable[[float, Mapping[str, float], float], None]
"""Receives the share of finished steps, the last measurements, and the seconds left (NaN until measured)."""


def create_accelerator(settings: Settings) -> Any:
    """Returns the `accelerate.Accelerator` of this process.

    Raises:
        ValueError: If accelerate is not installed.
    """
    require("train", "training", "accelerate")
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision=settings.mixed_precision)
    if accelerator.num_processes > 1:  # threads of the process group that are still alive may abort the exit
        atexit.register(accelerator.end_training)
    return accelerator


def fit(
    trainee: nn.Module,
    states: TargetStates,
    row: np.ndarray,
    held: np.ndarray,
    settings: Settings,
    folder: Path,
    report: Report = lambda share, measurements, left: None,
    *,
    measured: Callable[[Sequence[Mapping[str, float]]], None] = lambda history: None,
    measuring: Callable[[int, int], None] = lambda done, count: None,
    beginning: Sequence[int] = (),
    final_measurements: int = 0,
    progress: Progress | None = None,
    facts: Mapping[str, Any] = MappingProxyType({}),
    stop_after: int | None = None,
) -> Progress:
    """Trains until `settings.steps`, and continues from the checkpoint in `folder` if there is one.

    Batches and learning rates depend on the number of the step alone. A run that was killed therefore ends
    like one that was not, as far as arithmetic repeats. A kill loses the steps since the last
    checkpoint; see `Settings.saving`. `accelerate launch` runs it in several processes or on several machines.

    Args:
        trainee: Its forward maps tokens, int64 [B, length + 1], to (scalar loss, measurements by name as tensors). The
            same call measures held-out text. Its parameters must not include those of `states`.
        states: The frozen target.
        row: Training tokens, int32 [N]; `specdec_fast.train.heads.loss_mask` says how tokens without loss are stored.
        held: Held-out tokens, int32 [N].
        settings: Hyperparameters.
        folder: Folder of the checkpoints.
        report: Called after every step.
        measured: Called with the history by the first process, at the start and after every measurement.
        measuring: Called with the number of measured blocks of held-out text, and the number of all.
        beginning: Special tokens with which every block begins, as prompts do; see `token_batches.cut_block`.
        final_measurements: Passes over the held-out text that the caller makes afterwards, for the remaining time.
        progress: Receives the progress, so that the caller has it after an exception too.
        facts: Everything else that identifies the run, as JSON values; see `check_same_run`.
        stop_after: Ends this call after that many steps, with a checkpoint.

    Returns:
        The progress of the run.

    Raises:
        KeyboardInterrupt: After Ctrl-C, once a checkpoint is written.
        ValueError: If accelerate is not installed, the loss is NaN, or the checkpoint is damaged or belongs to
            another run.
    """
    accelerator = create_accelerator(settings)
    facts = with_process_count(facts, accelerator)
    check_same_run(folder, settings, facts)
    states.model.to(accelerator.device)
    optimiser = torch.optim.AdamW(
        [each for each in trainee.parameters() if each.requires_grad],
        lr=settings.lr,
        betas=settings.betas,
        weight_decay=settings.weight_decay,
    )
    wrapped, optimiser = accelerator.prepare(trainee, optimiser)
    progress = progress or Progress()
    accelerator.register_for_checkpointing(progress)
    load_checkpoint(accelerator, folder)
    started, earlier_seconds, first_step = time.monotonic(), progress.seconds, progress.step
    last_checkpoint, checkpoint_seconds, step_seconds = started, 0.0, 0.0
    time_left = TimeLeft(settings.steps, settings.measure_every, final_measurements)
    size, rank, device = accelerator.num_processes, accelerator.process_index, accelerator.device

    def measure() -> None:
        began = time.monotonic()
        measurements = _measure_held_out(wrapped, held, settings, device, beginning, measuring)
        time_left.add_measurement(time.monotonic() - began)
        progress.history.append(
            {"step": progress.step, **({"loss": progress.loss} if progress.step else {}), **measurements}
        )
        report_history()

    def report_history() -> None:
        if accelerator.is_main_process:
            try:
                measured(progress.history)
            except OSError as error:  # other processes wait for this one, and the checkpoint has the history too
                log.warning("training: the measurements could not be written: %s", error)

    note = "specdec: stopping after this step; press Ctrl-C again to stop at once\n"
    with held_interrupt(note if accelerator.is_main_process else "") as stop:
        if progress.history:
            report_history()
        else:
            measure()
        if stop[0] and size == 1 and not progress.step:
            raise KeyboardInterrupt  # nothing is trained yet
        while progress.step < settings.steps:
            step_began = time.monotonic()
            for group in optimiser.param_groups:
                group["lr"] = settings.rate(progress.step)
            tokens = blocks(
                row, progress.step * size + rank, settings.batch, settings.length, settings.seed, beginning
            ).to(device)
            with accelerator.autocast():
                loss, _ = wrapped(tokens)
            accelerator.backward(loss)
            clip = accelerator.clip_grad_value_ if settings.clip_values else accelerator.clip_grad_norm_
            clip(wrapped.parameters(), settings.clip)
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
            now = time.monotonic()
            progress.step, progress.seconds = progress.step + 1, earlier_seconds + now - started
            ending = stop_after is not None and progress.step - first_step >= stop_after
            due = settings.checkpoint_due(step_seconds, now - last_checkpoint, checkpoint_seconds)
            # processes must agree: the mean loss, and whether any of them wants to save or to stop
            mean, save, halt = accelerator.reduce(
                torch.stack([loss.detach().float() / size, *torch.tensor([float(due), float(stop[0])]).to(device)])
            ).tolist()
            step_seconds = time.monotonic() - step_began
            time_left.add_step(step_seconds)
            if mean != mean:
                raise ValueError(
                    f"training: the loss of step {progress.step}: got NaN; expected a number; lower the learning rate"
                )
            progress.loss = mean if progress.loss != progress.loss else 0.95 * progress.loss + 0.05 * mean
            done = progress.step >= settings.steps
            if progress.step % settings.measure_every == 0 or done:
                measure()
            if save or halt or ending or done:
                began = time.monotonic()
                save_checkpoint(accelerator, folder, {**run_identity(settings, facts), "step": progress.step})
                last_checkpoint = time.monotonic()
                checkpoint_seconds = last_checkpoint - began
                time_left.add_checkpoint(checkpoint_seconds)
            left = time_left.seconds(progress.step)
            report(progress.step / settings.steps, {**progress.history[-1], "loss": progress.loss}, left)
            if halt:
                raise KeyboardInterrupt
            if ending:
                break
    accelerator.wait_for_everyone()
    accelerator.free_memory(wrapped, optimiser)
    return progress


@torch.no_grad()
def _measure_held_out(
    trainee: nn.Module,
    held: np.ndarray,
    settings: Settings,
    device: torch.device,
    beginning: Sequence[int],
    measuring: Callable[[int, int], None],
) -> dict[str, float]:
    """Returns mean measurements over the held-out tokens with loss, equal in every process."""
    length = settings.length
    starts = range(0, len(held) - length, length)
    total: dict[str, float] = {}
    counted = 0
    trainee.eval()
    for done, start in enumerate(starts, 1):
        tokens = torch.from_numpy(cut_block(held, start, length, beginning))[None].to(device)
        loss, measurements = trainee(tokens)
        count = int((tokens[:, 2:] >= 0).sum())  # no head predicts the first two
        counted += count
        for name, value in {"held_loss": loss, **measurements}.items():
            total[name] = total.get(name, 0.0) + float(value) * count
        measuring(done, len(starts))
    trainee.train()
    return {name: value / max(counted, 1) for name, value in total.items()}
