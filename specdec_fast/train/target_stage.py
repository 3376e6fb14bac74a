"""Stages 2 and 3: train the target on text, then teach it not to repeat itself."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from specdec_fast.train.data import Tokens, blocks
from specdec_fast.train.loop import Progress, Report, Schedule, fit
from specdec_fast.train.measure import continue_text
from specdec_fast.train.models import build, grow, start_quietly
from specdec_fast.train.recipe import Recipe
from specdec_fast.train.unlikelihood import repetition_mask, unlikelihood

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM


def next_token_loss(model: LlamaForCausalLM, compiled: bool) -> Callable[[Tensor], Tensor]:
    """Mean cross-entropy of ids [B, T + 1], optionally through torch.compile (about 1.4 times as fast on a CPU)."""
    def loss(ids: Tensor) -> Tensor:
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        return functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    return torch.compile(loss, dynamic=False) if compiled else loss


def _text_losses(recipe: Recipe, loss: Callable[[Tensor], Tensor], row: np.ndarray, first_step: int, long_from: float
                 ) -> Callable[[int, float], Iterator[tuple[Tensor, int]]]:
    def losses(step: int, progress: float) -> Iterator[tuple[Tensor, int]]:
        count = recipe.blocks_per_step
        for block in blocks(row, first_step + step, count, recipe.block, recipe.seed).split(1):
            if progress < long_from:
                pieces = range(0, recipe.block, recipe.short)
                block = torch.cat([block[:, i:i + recipe.short + 1] for i in pieces])
            yield loss(block) / count, recipe.block
    return losses


def train_target(recipe: Recipe, out: Path, report: Report, stop_after: int | None = None) -> Progress:
    """Train a shallow model, stack its layers to the full depth, train on. Checkpoints: target-start.pt, target.pt."""
    row = Tokens.load(out / "tokens.npz").train
    shallow = build(dataclasses.replace(recipe.target, layers=recipe.start_layers), recipe.seed)
    start_quietly(shallow)
    rates = {"muon_lr": recipe.muon_lr, "adam_lr": recipe.adam_lr, "save_every": recipe.save_every}
    started = fit("target-start", shallow,
                  _text_losses(recipe, next_token_loss(shallow, recipe.compiled), row, 0, 2.0),
                  recipe.start_budget, out / "target-start.pt", report, schedule=Schedule(1.0, 0.7, 0.03),
                  stop_after=stop_after, **rates)
    if not started.done:
        return started
    model = build(recipe.target, recipe.seed)
    grow(shallow, model)
    return fit("target", model,
               _text_losses(recipe, next_token_loss(model, recipe.compiled), row, started.step, recipe.long_from),
               recipe.target_budget, out / "target.pt", report, schedule=Schedule(0.7, 0.0, 0.03),
               stop_after=stop_after, **rates)


def load_model(recipe_shape_model: LlamaForCausalLM, checkpoint: Path) -> LlamaForCausalLM:
    """The model with the weights of a checkpoint, in evaluation mode."""
    stored = torch.load(checkpoint, map_location="cpu", weights_only=True)
    recipe_shape_model.load_state_dict(stored["model"])
    return recipe_shape_model.eval()


def train_unlikelihood(recipe: Recipe, out: Path, report: Report, stop_after: int | None = None) -> Progress:
    """Continue texts greedily or by sampling and penalise repeated 4-grams, beside ordinary text. Checkpoint: final.pt."""
    row = Tokens.load(out / "tokens.npz").train
    model = load_model(build(recipe.target, recipe.seed), out / "target.pt")
    text = next_token_loss(model, compiled=False)

    def losses(step: int, progress: float) -> Iterator[tuple[Tensor, int]]:
        rng = np.random.default_rng((recipe.seed, 7, step))
        generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + step)
        starts = rng.integers(0, len(row) - recipe.repeat_prefix, recipe.repeat_rows)
        prefix = torch.from_numpy(np.stack([row[s:s + recipe.repeat_prefix].astype(np.int64) for s in starts]))
        temperature = (0.0, 0.0, 0.7)[step % 3]
        written = continue_text(model, prefix, recipe.repeat_length, temperature, generator)
        mask = repetition_mask(written, recipe.repeat_prefix)[:, 1:]
        logits = model(input_ids=written[:, :-1], use_cache=False).logits
        yield recipe.repeat_weight * unlikelihood(logits, written[:, 1:], mask), recipe.repeat_rows * recipe.repeat_length
        count = recipe.blocks_per_step
        for block in blocks(row, 500_000 + step, count, recipe.block, recipe.seed).split(1):
            yield text(block) / count, recipe.block

    return fit("unlikelihood", model, losses, recipe.unlikelihood_budget, out / "final.pt", report,
               schedule=Schedule(0.1, 0.02, 0.05), muon_lr=recipe.muon_lr, adam_lr=recipe.adam_lr,
               save_every=recipe.save_every, stop_after=stop_after)
