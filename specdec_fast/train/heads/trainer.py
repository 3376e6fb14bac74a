"""The training loop of heads over a frozen target: accelerate, checkpoints that survive a kill, curves.

Knows no architecture: a trainee is a module whose forward takes a batch of tokens and answers with its loss. Tests:
tests/train/heads/test_trainer.py.
"""

from __future__ import annotations

import atexit
import json
import logging
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from specdec_fast.extras import require
from specdec_fast.train.demo_pair.training_loop import held_interrupt
from specdec_fast.train.token_batches import blocks
from specdec_kernels.names import unknown_name

log = logging.getLogger("specdec_fast")

# (share done, what was measured last, seconds left)
Report = Callable[[float, Mapping[str, float], float], None]
_SHARE = 0.05
"""Of the time, for checkpoints that take longer than a step."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How a head is trained. steps: of all processes together; batch: blocks per step and process; length: tokens per
    block; lr, warm_up, betas, weight_decay: of AdamW, with a linear warm-up, then a fall to zero along a cosine or a
    line (schedule); clip: most that the norm of the gradient may be, or any of its values (clip_values); measure_every:
    steps between two looks at held-out text; saving: share of the time that checkpoints may take, 1 for one behind
    every step; None: behind every step where writing one takes no longer than a step, else a twentieth of the time.

    Raises ValueError for values that make no training.
    """

    steps: int = 1000
    batch: int = 8
    length: int = 512
    lr: float = 1e-3
    warm_up: float = 0.1
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    clip: float = 1.0
    clip_values: bool = False
    schedule: str = "cosine"
    seed: int = 0
    measure_every: int = 100
    saving: float | None = None
    mixed_precision: str = "no"

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "length", "measure_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"training {name}: got {getattr(self, name)}; expected at least 1")
        if not self.lr > 0 or not 0 <= self.warm_up < 1 or not 0 < (1 if self.saving is None else self.saving) <= 1:
            raise ValueError(
                f"training lr, warm_up, saving: got {self.lr}, {self.warm_up}, {self.saving}; expected a positive "
                "rate, a share below 1, and a share above 0 or none"
            )
        for name, known in (("schedule", ("cosine", "linear")), ("mixed_precision", ("no", "bf16", "fp16"))):
            if (got := getattr(self, name)) not in known:
                raise ValueError(unknown_name(f"training {name}", got, known))

    def rate(self, step: int) -> float:
        """The learning rate of a step."""
        warm = self.warm_up * self.steps
        if step < warm:
            return self.lr * (step + 1) / (warm + 1)
        done = min((step - warm) / max(self.steps - warm, 1), 1.0)
        return self.lr * (1 - done if self.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done)))

    def due(self, step: float, since: float, cost: float) -> bool:
        """Whether to write a checkpoint: seconds of the last step, since the last checkpoint, and that it took."""
        if self.saving is None and cost <= step:
            return True
        return (_SHARE if self.saving is None else self.saving) * (since + cost) >= cost


@dataclass(slots=True)
class Progress:
    """Where a run stands; stored with every checkpoint. history: what was measured, by step."""

    step: int = 0
    seconds: float = 0.0
    loss: float = float("nan")
    history: list[dict[str, float]] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "seconds": self.seconds, "loss": self.loss, "history": self.history}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)


class TargetStates:
    """The hidden states of a frozen transformers model at named places, as `Needs.aux_hidden_states` has them.

    model: a transformers causal LM. tokens int64 [B, L] -> {auxiliary hidden state: [B, L, hidden]}, without gradients.
    """

    def __init__(self, model: Any, aux_hidden_states: tuple[str, ...]) -> None:
        self.model, self.aux_hidden_states = model.eval().requires_grad_(False), aux_hidden_states
        count = model.config.get_text_config().num_hidden_layers
        self._layers = next(
            (each for each in model.base_model.modules() if isinstance(each, nn.ModuleList) and len(each) == count),
            None,
        )
        for aux_hidden_state in aux_hidden_states:
            place, _, index = aux_hidden_state.partition(":")
            known = place == "entering" and index.isdigit() and int(index) < count and self._layers is not None
            if aux_hidden_state != "final_norm" and not known:
                raise ValueError(
                    f"auxiliary hidden state: got {aux_hidden_state!r}; expected 'final_norm' or 'entering:i' with i "
                    f"< {count}"
                )

    @property
    def hidden_size(self) -> int:
        return int(self.model.config.get_text_config().hidden_size)

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> dict[str, Tensor]:
        caught: dict[str, Tensor] = {}
        hooks = []
        for aux_hidden_state in self.aux_hidden_states:
            if aux_hidden_state != "final_norm":
                assert self._layers is not None

                def keep(
                    _module: Any,
                    args: tuple[Any, ...],
                    kwargs: dict[str, Any],
                    aux_hidden_state: str = aux_hidden_state,
                ) -> None:
                    caught[aux_hidden_state] = args[0] if args else kwargs["hidden_states"]

                layer = self._layers[int(aux_hidden_state.partition(":")[2])]
                hooks.append(layer.register_forward_pre_hook(keep, with_kwargs=True))
        try:
            output = self.model.base_model(input_ids=tokens, use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        if "final_norm" in self.aux_hidden_states:
            caught["final_norm"] = output[0]
        return caught

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of hidden states as tapped at "final_norm"; gradients go through to `hidden`."""
        logits: Tensor = self.model.get_output_embeddings()(hidden)
        softcap = getattr(self.model.config.get_text_config(), "final_logit_softcapping", None)
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def accelerator_of(settings: Settings) -> Any:
    """accelerate's view of this process: its device, its rank, and all that the others must agree on.

    Raises ValueError where accelerate is absent.
    """
    require("train", "training", "accelerate")
    from accelerate import Accelerator

    made = Accelerator(mixed_precision=settings.mixed_precision)
    if made.num_processes > 1:  # threads of the group that live on may abort the program as it ends
        atexit.register(made.end_training)
    return made


def fit(
    trainee: nn.Module,
    states: TargetStates,
    row: np.ndarray,
    held: np.ndarray,
    settings: Settings,
    folder: Path,
    report: Report = lambda share, found, left: None,
    *,
    measured: Callable[[Sequence[Mapping[str, float]]], None] = lambda history: None,
    facts: Mapping[str, Any] = MappingProxyType({}),
    stop_after: int | None = None,
) -> Progress:
    """Train until `settings.steps`, going on from the checkpoint in `folder` when there is one.

    trainee: forward(tokens int64 [B, length + 1]) -> (scalar loss, measures by name as tensors), called the same way
    on held-out text; it keeps `states` out of its own parameters. row, held: tokens [N], those that do not count as in
    specdec_fast/train/heads/loss_mask.py. measured: told the history by the first process, at the beginning and
    whenever something was added. facts: what else makes this run, as JSON has it (see `refuse_another_run`).
    stop_after: end this call after so many steps, checkpoint written.

    Batches and rates depend on the number of the step alone, so a run that was killed ends as one that was not, as far
    as arithmetic repeats. A kill loses what was done since the last checkpoint, see `Settings.saving`: the step under
    way where every step has one. `accelerate launch` makes it several processes or machines.

    Raises KeyboardInterrupt after Ctrl-C, checkpoint written; ValueError where accelerate is absent, and for a
    checkpoint that is of other settings or facts, or cannot be read.
    """
    accelerator = accelerator_of(settings)
    facts = with_team(facts, accelerator)
    refuse_another_run(folder, settings, facts)
    states.model.to(accelerator.device)
    optimiser = torch.optim.AdamW(
        [each for each in trainee.parameters() if each.requires_grad],
        lr=settings.lr,
        betas=settings.betas,
        weight_decay=settings.weight_decay,
    )
    wrapped, optimiser = accelerator.prepare(trainee, optimiser)
    at = Progress()
    accelerator.register_for_checkpointing(at)
    _resume(accelerator, folder)
    started, before, begun = time.monotonic(), at.seconds, at.step
    saved, cost, took = started, 0.0, 0.0  # when a checkpoint was, what it took, and what the last step did
    size, rank, device = accelerator.num_processes, accelerator.process_index, accelerator.device

    def measure() -> None:
        found = _held_out(wrapped, held, settings, device)
        at.history.append({"step": at.step, **({"loss": at.loss} if at.step else {}), **found})
        tell()

    def tell() -> None:
        if accelerator.is_main_process:
            try:
                measured(at.history)
            except OSError as error:  # the others wait for this process, and the measures are in the checkpoint too
                log.warning("training: what was measured could not be written: %s", error)

    with held_interrupt() as stop:
        if at.history:
            tell()
        else:
            measure()
        while at.step < settings.steps:
            step_began = time.monotonic()
            for group in optimiser.param_groups:
                group["lr"] = settings.rate(at.step)
            tokens = blocks(row, at.step * size + rank, settings.batch, settings.length, settings.seed).to(device)
            with accelerator.autocast():
                loss, _ = wrapped(tokens)
            accelerator.backward(loss)
            clip = accelerator.clip_grad_value_ if settings.clip_values else accelerator.clip_grad_norm_
            clip(wrapped.parameters(), settings.clip)
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
            now = time.monotonic()
            at.step, at.seconds = at.step + 1, before + now - started
            ending = stop_after is not None and at.step - begun >= stop_after
            due = settings.due(took, now - saved, cost)
            # all processes do the same: the mean loss, and whether anybody wants to save or to stop
            mean, save, halt = accelerator.reduce(
                torch.stack([loss.detach().float() / size, *torch.tensor([float(due), float(stop[0])]).to(device)])
            ).tolist()
            took = time.monotonic() - step_began
            if mean != mean:
                raise ValueError(f"training: the loss of step {at.step} is no number; expected one; lower the rate")
            at.loss = mean if at.loss != at.loss else 0.95 * at.loss + 0.05 * mean
            done = at.step >= settings.steps
            if at.step % settings.measure_every == 0 or done:
                measure()
            if save or halt or ending or done:
                began = time.monotonic()
                _save(accelerator, folder, {**_made_of(settings, facts), "step": at.step})
                saved = time.monotonic()
                cost = saved - began
            left = (settings.steps - at.step) * (time.monotonic() - started) / max(at.step - begun, 1)
            report(at.step / settings.steps, {**at.history[-1], "loss": at.loss}, left)
            if halt:
                raise KeyboardInterrupt
            if ending:
                break
    accelerator.wait_for_everyone()
    accelerator.free_memory(wrapped, optimiser)
    return at


@torch.no_grad()
def _held_out(trainee: nn.Module, held: np.ndarray, settings: Settings, device: torch.device) -> dict[str, float]:
    """Mean measures over the held-out tokens that count, the same in every process."""
    length = settings.length
    starts = range(0, len(held) - length, length)
    total: dict[str, float] = {}
    counted = 0
    trainee.eval()
    for start in starts:
        tokens = torch.from_numpy(held[start : start + length + 1].astype(np.int64))[None].to(device)
        loss, found = trainee(tokens)
        count = int((tokens[:, 2:] >= 0).sum())  # the first two are nobody's guess
        counted += count
        for name, value in {"held_loss": loss, **found}.items():
            total[name] = total.get(name, 0.0) + float(value) * count
    trainee.train()
    return {name: value / max(counted, 1) for name, value in total.items()}


_FREE = ("measure_every", "saving")
"""Settings that change nothing in what is trained: a run may go on with others."""


def _made_of(settings: Settings, facts: Mapping[str, Any]) -> dict[str, Any]:
    """All that makes a run what it is, as it comes back from JSON."""
    own = {name: value for name, value in asdict(settings).items() if name not in _FREE}
    found: dict[str, Any] = json.loads(json.dumps({**own, **facts}))
    return found


def with_team(facts: Mapping[str, Any], accelerator: Any) -> dict[str, Any]:
    """Facts of a run and how many processes share a step: its batches and their size follow from that too."""
    return {**facts, "number of processes": int(accelerator.num_processes)}


def stored_step(folder: Path) -> int:
    """The step behind which the checkpoint in `folder` was written; 0 without one that can be read."""
    for place in _places(folder):
        if place.is_dir():
            try:
                return int(json.loads((place / _RUN).read_text())["step"])
            except (OSError, ValueError, KeyError, TypeError):
                break
    return 0


def refuse_another_run(folder: Path, settings: Settings, facts: Mapping[str, Any]) -> None:
    """Raises ValueError where the checkpoint in `folder` was made with other settings or facts.

    Batches, rates and the split between training and held-out text follow from them: a run that went on with others
    would be measured on text that it was trained on.
    """
    place = next((place for place in _places(folder) if place.is_dir()), None)
    if place is None:
        return
    try:
        made_of = json.loads((place / _RUN).read_text())
    except (OSError, ValueError):
        return  # damaged: `_resume` says so
    for name, want in _made_of(settings, facts).items():
        if made_of.get(name) != want:
            raise ValueError(
                f"{place}: the run in it has another {name}: got {want!r}; expected {made_of.get(name)!r}, with which "
                f"it was begun; go on with that, train into another --out, or remove {place} to begin anew"
            )


_RUN = "run.json"
"""In a checkpoint: what the run is made of, and its step."""


def _places(folder: Path) -> tuple[Path, Path]:
    """Where a whole checkpoint may be."""
    return folder / "checkpoint", folder / "checkpoint.old"


def _save(accelerator: Any, folder: Path, made_of: Mapping[str, Any]) -> None:
    """Write under another name, then rename: a kill leaves a whole checkpoint under one of two names."""
    new, (here, old) = folder / "checkpoint.partial", _places(folder)
    if accelerator.is_main_process:
        shutil.rmtree(new, ignore_errors=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(new))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        (new / _RUN).write_text(json.dumps(made_of))
        if here.exists():  # else the older one is all there is until the new one has its name
            shutil.rmtree(old, ignore_errors=True)
            here.rename(old)
        new.rename(here)
        shutil.rmtree(old, ignore_errors=True)
    accelerator.wait_for_everyone()


def _resume(accelerator: Any, folder: Path) -> None:
    from safetensors import SafetensorError

    for place in _places(folder):
        if place.is_dir():
            try:
                json.loads((place / _RUN).read_text())
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
                    f"{place}: it cannot be read, or is of other settings: {reason}; train into another --out, or "
                    "remove it to begin anew"
                ) from None
            return
