"""Stages 2 and 3 of the demo pair: trains the target on text, then against repetition."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from specdec_fast.train.demo_pair.measure import continue_text
from specdec_fast.train.demo_pair.model_shapes import build, grow, mixed, start_quietly
from specdec_fast.train.demo_pair.recipe import Recipe
from specdec_fast.train.demo_pair.training_loop import Progress, Report, Schedule, fit, save_atomically
from specdec_fast.train.demo_pair.unlikelihood import repetition_mask, unlikelihood
from specdec_fast.train.demo_pair.worker_processes import Team
from specdec_fast.train.token_batches import Tokens, blocks

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM


def compile_layers(model: LlamaForCausalLM) -> None:
    """Compiles the layers one by one, which takes a fraction of the compile time of a whole model.

    Attention runs eagerly: at these lengths two plain products take half the time of the fused call.
    """
    model.set_attn_implementation("eager")
    for layer in model.model.layers:
        layer.compile(dynamic=False)


def next_token_loss(model: LlamaForCausalLM, bfloat16: bool = False) -> Callable[[Tensor], Tensor]:
    """Returns a function that maps ids, int64 [B, T + 1], to their mean cross-entropy."""

    def loss(ids: Tensor) -> Tensor:
        with mixed(bfloat16):
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        return functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())

    return loss


def _text_losses(
    recipe: Recipe,
    loss: Callable[[Tensor], Tensor],
    row: np.ndarray,
    first_step: int,
    lengths: tuple[tuple[float, int], ...],
    team: Team,
) -> Callable[[int, float], Iterator[tuple[Tensor, int]]]:
    def losses(step: int, progress: float) -> Iterator[tuple[Tensor, int]]:
        count = recipe.blocks_per_step
        taken = blocks(row, first_step + step, count, recipe.block, recipe.seed)
        for index in team.share(count):
            block = taken[index : index + 1]
            length = [length for share, length in lengths if share <= progress][-1]
            block = torch.cat([block[:, i : i + length + 1] for i in range(0, recipe.block, length)])
            yield loss(block) / (count / team.size), recipe.block

    return losses


def train_target(
    recipe: Recipe, out: Path, report: Report, stop_after: int | None = None, team: Team = Team()
) -> Progress:
    """Trains a shallow model, repeats its layers to the full depth, and continues the training.

    Checkpoints are target-start.pt and target.pt.

    Args:
        recipe: The recipe.
        out: Work folder.
        report: Called after every step.
        stop_after: Ends this call after that many steps of a stage.
        team: This process's place among the training processes.

    Returns:
        The progress of the last stage that ran.
    """
    row = Tokens.load(out / "tokens.npz").train
    shallow = build(dataclasses.replace(recipe.target, layers=recipe.start_layers), recipe.seed)
    start_quietly(shallow)
    if recipe.compiled:
        compile_layers(shallow)
    rates: dict[str, Any] = {
        "team": team,
        "muon_lr": recipe.muon_lr,
        "adam_lr": recipe.adam_lr,
        "bfloat16": recipe.bfloat16,
        "save_every": recipe.save_every,
    }
    started = fit(
        "target-start",
        shallow,
        _text_losses(recipe, next_token_loss(shallow, recipe.bfloat16), row, 0, recipe.lengths[:1], team),
        recipe.start_budget,
        out / "target-start.pt",
        report,
        schedule=Schedule(1.0, 0.7, 0.03),
        stop_after=stop_after,
        **rates,
    )
    if not started.done:
        return started
    model = build(recipe.target, recipe.seed)
    grow(shallow, model)
    if recipe.compiled:
        compile_layers(model)
    return fit(
        "target",
        model,
        _text_losses(recipe, next_token_loss(model, recipe.bfloat16), row, started.step, recipe.lengths, team),
        recipe.target_budget,
        out / "target.pt",
        report,
        schedule=Schedule(0.7, 0.0, 0.03),
        stop_after=stop_after,
        **rates,
    )


def load_model(model: LlamaForCausalLM, checkpoint: Path) -> LlamaForCausalLM:
    """Loads the weights of a checkpoint into a model; returns it in evaluation mode."""
    stored = torch.load(checkpoint, map_location="cpu", weights_only=True)
    model.load_state_dict(stored["model"])
    return model.eval()


def train_unlikelihood(
    recipe: Recipe, out: Path, report: Report, stop_after: int | None = None, team: Team = Team()
) -> Progress:
    """Runs the rounds of unlikelihood training, and averages the weights at their ends.

    The averaged model repeats itself less and has fewer bits per byte than each round's. Checkpoints are round-1.pt and
    so on, and final.pt.

    Args:
        recipe: The recipe.
        out: Work folder.
        report: Called after every step.
        stop_after: Ends this call after that many steps of a round.
        team: This process's place among the training processes.

    Returns:
        The progress of all rounds together, or of a round that did not end.

    Source:
        Izmailov et al. 2018 (arXiv:1803.05407) for averaged weights.
    """
    if (out / "final.pt").exists():
        return Progress(**torch.load(out / "final.pt", map_location="cpu", weights_only=True)["progress"])
    start, ends = out / "target.pt", []
    for number in range(recipe.unlikelihood_rounds):
        end = out / f"round-{number + 1}.pt"
        progress = _unlikelihood_round(recipe, number, start, end, report, stop_after, team)
        if not progress.done:
            return progress
        team.wait()  # the first process has written the checkpoint that all load next
        start = end
        ends.append(end)
    rounds = [torch.load(end, map_location="cpu", weights_only=True) for end in ends]
    total = Progress(
        step=sum(each["progress"]["step"] for each in rounds),
        tokens=sum(each["progress"]["tokens"] for each in rounds),
        seconds=sum(each["progress"]["seconds"] for each in rounds),
        loss=progress.loss,
        done=True,
    )
    if team.rank == 0:
        weights = [each["model"] for each in rounds]
        mean = {name: torch.stack([each[name] for each in weights]).mean(0) for name in weights[0]}
        save_atomically({"model": mean, "progress": asdict(total)}, out / "final.pt")
    return total


def _unlikelihood_round(
    recipe: Recipe, number: int, start: Path, end: Path, report: Report, stop_after: int | None, team: Team
) -> Progress:
    """Trains one round: on ordinary text, and against repeated 4-grams in text that the model generates."""
    row = Tokens.load(end.parent / "tokens.npz").train
    model = load_model(build(recipe.target, recipe.seed), start)
    text = next_token_loss(model, recipe.bfloat16)

    def losses(step: int, progress: float) -> Iterator[tuple[Tensor, int]]:
        key = (recipe.seed, 7 + 2 * number, step, team.rank)
        rng = np.random.default_rng(key)
        generator = torch.Generator().manual_seed(int(rng.integers(2**62)))
        rows = len(team.share(recipe.repeat_rows))
        starts = rng.integers(0, len(row) - recipe.repeat_prefix, rows)
        prefix = torch.from_numpy(np.stack([row[s : s + recipe.repeat_prefix].astype(np.int64) for s in starts]))
        temperature = (0.0, 0.0, 0.7)[step % 3]
        written = continue_text(model, prefix, recipe.repeat_length, temperature, generator)
        mask = repetition_mask(written, recipe.repeat_prefix)[:, 1:]
        with mixed(recipe.bfloat16):
            logits = model(input_ids=written[:, :-1], use_cache=False).logits
        yield recipe.repeat_weight * unlikelihood(logits, written[:, 1:], mask), rows * recipe.repeat_length
        count = recipe.repeat_blocks
        taken = blocks(row, 500_000 * (1 + number) + step, count, recipe.block, recipe.seed)
        for index in team.share(count):
            yield text(taken[index : index + 1]) / (count / team.size), recipe.block

    return fit(
        f"unlikelihood {number + 1}",
        model,
        losses,
        recipe.unlikelihood_budget,
        end,
        report,
        schedule=Schedule(0.6, 0.0, 0.05),
        muon_lr=recipe.repeat_muon_lr,
        adam_lr=recipe.repeat_adam_lr,
        bfloat16=recipe.bfloat16,
        save_every=recipe.save_every,
        stop_after=stop_after,
        team=team,
    )
