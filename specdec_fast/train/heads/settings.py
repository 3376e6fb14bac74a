"""Settings of a head's training, and the progress that checkpoints store.

Tests: tests/train/heads/test_trainer.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specdec_kernels.unknown_names import unknown_name

_CHECKPOINT_SHARE = 0.05
"""Share of the time for checkpoints that take longer than a step."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Hyperparameters of a training run.

    Attributes:
        steps: Optimiser steps, which all processes take together.
        batch: Blocks per step and process.
        length: Tokens per block.
        lr: Highest learning rate of AdamW.
        warm_up: Share of the steps with a linear warm-up.
        betas: Betas of AdamW.
        weight_decay: Weight decay of AdamW.
        clip: Largest norm of the gradient, or largest absolute value with `clip_values`.
        clip_values: Clips single values of the gradient instead of its norm.
        schedule: "cosine" or "linear"; the rate falls to zero along it after the warm-up.
        seed: Seed of weights and batches.
        measure_every: Steps between two measurements on held-out text.
        saving: Share of the time that checkpoints may take; 1 writes one after every step. None writes one after
            every step if that takes no longer than a step, and otherwise allows 5 % of the time.
        mixed_precision: "no", "bf16" or "fp16".

    Raises:
        ValueError: If a value is out of range.
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
        """Returns the learning rate of a step."""
        warm = self.warm_up * self.steps
        if step < warm:
            return self.lr * (step + 1) / (warm + 1)
        done = min((step - warm) / max(self.steps - warm, 1), 1.0)
        return self.lr * (1 - done if self.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done)))

    def checkpoint_due(self, step_seconds: float, seconds_since: float, checkpoint_seconds: float) -> bool:
        """Returns whether to write a checkpoint now.

        Args:
            step_seconds: Duration of the last step.
            seconds_since: Time since the last checkpoint.
            checkpoint_seconds: Time that the last checkpoint took.
        """
        if self.saving is None and checkpoint_seconds <= step_seconds:
            return True
        share = _CHECKPOINT_SHARE if self.saving is None else self.saving
        return share * (seconds_since + checkpoint_seconds) >= checkpoint_seconds


@dataclass(slots=True)
class Progress:
    """Progress of a training run, stored with every checkpoint.

    Attributes:
        step: Steps taken so far.
        seconds: Training time so far.
        loss: Moving average of the training loss; NaN before the first step.
        history: Measurements in the order of their steps.
    """

    step: int = 0
    seconds: float = 0.0
    loss: float = float("nan")
    history: list[dict[str, float]] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        """Returns the fields by name, as accelerate stores them."""
        return {"step": self.step, "seconds": self.seconds, "loss": self.loss, "history": self.history}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores fields that `state_dict` returned."""
        for name, value in state.items():
            setattr(self, name, value)
