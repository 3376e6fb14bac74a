"""Stage 4 of the demo pair: distils the draft from the target's distribution."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from specdec_fast.train.demo_pair.measure import continue_text
from specdec_fast.train.demo_pair.model_shapes import build, mixed
from specdec_fast.train.demo_pair.recipe import Recipe
from specdec_fast.train.demo_pair.target_stage import load_model
from specdec_fast.train.demo_pair.training_loop import Budget, Losses, Progress, Report, Schedule, fit
from specdec_fast.train.demo_pair.worker_processes import Team
from specdec_fast.train.token_batches import Tokens, blocks

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM


# scales the distance to the size of the cross-entropy, so that the learning rates fit both
DISTANCE_SCALE = 4.0


def distillation_loss(draft_logits: Tensor, target_logits: Tensor, distance_weight: Tensor | float) -> Tensor:
    """Computes the cross-entropy to the target's distribution, mixed with the total variation distance.

    That distance is 1 - alpha, so training gives it a growing weight.

    Args:
        draft_logits: [N, V].
        target_logits: [N, V].
        distance_weight: Weight of the distance, in [0, 1].

    Returns:
        The scalar loss.

    Source:
        Zhou et al. 2024 (DistillSpec, arXiv:2310.08461), section 3; Leviathan et al. 2023 (arXiv:2211.17192),
        section 3.
    """
    p = target_logits.softmax(-1)
    log_q = draft_logits.log_softmax(-1)
    cross_entropy = -(p * log_q).sum(-1).mean()
    distance = 0.5 * (p - log_q.exp()).abs().sum(-1).mean()
    return (1.0 - distance_weight) * cross_entropy + distance_weight * DISTANCE_SCALE * distance


def start_draft(draft: LlamaForCausalLM, target: LlamaForCausalLM) -> None:
    """Sets the draft's embedding to the best low-rank approximation of the target's, in place."""
    u, s, _ = torch.linalg.svd(target.model.embed_tokens.weight.float(), full_matrices=False)
    width = draft.config.hidden_size
    draft.model.embed_tokens.weight.data.copy_(u[:, :width] * s[:width])
    for layer in draft.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)


def _pieces(recipe: Recipe) -> list[tuple[int, int]]:
    """Returns (first row, last row) of each batch: 8 rows of training text, or 32 that the target continues."""
    text, total = recipe.corpus_contexts, recipe.corpus_contexts + recipe.sampled_contexts
    cuts = [*range(0, text, 8), *range(text, total, 32), total]
    return list(itertools.pairwise(cuts))


@torch.no_grad()
def write_contexts(recipe: Recipe, target: LlamaForCausalLM, out: Path, report: Report, team: Team = Team()) -> None:
    """Writes contexts and the target's last hidden states after them, resumably: contexts.npy, hidden.npy.

    Most contexts are training text. The others are continued by the target at temperature 1 or greedily, since the
    draft sees such text in use. Hidden states take a quarter of the memory of logits, which one product gives.
    """
    row = Tokens.load(out / "tokens.npz").train
    total, length = recipe.corpus_contexts + recipe.sampled_contexts, recipe.context
    names = {
        "contexts.npy": (np.int16, (total, length)),
        "hidden.npy": (np.float16, (total, length, recipe.target.hidden)),
    }
    if team.rank == 0:
        for name, (kind, shape) in names.items():
            if not (out / name).exists():
                np.lib.format.open_memmap(out / name, "w+", kind, shape).flush()
    team.wait()
    contexts, hidden = (np.load(out / name, mmap_mode="r+") for name in names)
    mine = [piece for index, piece in enumerate(_pieces(recipe)) if index % team.size == team.rank]
    mark = out / f"contexts.{team.rank}of{team.size}"
    done = int(mark.read_text()) if mark.exists() else 0
    for number, (first, last) in list(enumerate(mine))[done:]:
        if first < recipe.corpus_contexts:
            ids = torch.cat([blocks(row, i, 1, length, recipe.seed + 1) for i in range(first, last)])[:, :length]
        else:
            generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + first)
            prefix = torch.cat([blocks(row, i, 1, length, recipe.seed + 2) for i in range(first, last)])[
                :, : length // 4
            ]
            temperature = 0.0 if number % 3 == 2 else 1.0
            ids = continue_text(target, prefix, length - prefix.shape[1], temperature, generator)
        with mixed(recipe.bfloat16):
            states = target.model(input_ids=ids, use_cache=False).last_hidden_state
        contexts[first:last] = ids.numpy()
        hidden[first:last] = states.to(torch.float16).numpy()
        contexts.flush()
        hidden.flush()
        partial = mark.with_name(mark.name + ".partial")  # every process has its own
        partial.write_text(str(number + 1))
        os.replace(partial, mark)
        report("contexts", (number + 1) / len(mine), float("nan"), last * length, float("nan"), float("nan"))
    team.wait()


def train_draft(
    recipe: Recipe, out: Path, report: Report, stop_after: int | None = None, team: Team = Team()
) -> Progress:
    """Distils the draft from the final target; the checkpoint is draft.pt.

    Args:
        recipe: The recipe.
        out: Work folder.
        report: Called after every step.
        stop_after: Ends this call after that many steps.
        team: This process's place among the training processes.

    Returns:
        The progress of the stage.
    """
    target = load_model(build(recipe.target, recipe.seed), out / "final.pt")
    write_contexts(recipe, target, out, report, team)
    draft = build(recipe.draft, recipe.seed)
    start_draft(draft, target)
    losses = distillation_losses(
        recipe,
        out,
        target.lm_head.weight.detach(),
        draft,
        team,
        order_key=11,
        distance_weight=lambda progress: min(max((progress - 0.4) / 0.4, 0.0), 1.0) * 0.7,
    )
    return distil("draft", draft, losses, recipe.draft_budget, recipe, out, report, stop_after, team)


def distillation_losses(
    recipe: Recipe,
    out: Path,
    head: Tensor,
    student: LlamaForCausalLM,
    team: Team,
    *,
    order_key: int,
    distance_weight: Callable[[float], float],
) -> Losses:
    """Makes the losses of each step of a distillation from the contexts that `write_contexts` has written.

    Args:
        recipe: The recipe.
        out: Work folder.
        head: Output matrix of the target, [V, C]. It makes logits of its stored hidden states.
        student: The model that is trained.
        team: This process's place among the training processes.
        order_key: Part of the seed of the order of contexts.
        distance_weight: Weight of the distance in `distillation_loss`, by the share of the budget that is used up.

    Returns:
        The losses, for `fit`.
    """
    contexts, hidden = (np.load(out / name, mmap_mode="r") for name in ("contexts.npy", "hidden.npy"))
    per_epoch, each = max(len(contexts) // recipe.contexts_per_step, 1), recipe.contexts_per_step

    def losses(step: int, progress: float) -> Iterator[tuple[Tensor, int]]:
        epoch, place = divmod(step, per_epoch)
        order = np.random.default_rng((recipe.seed, order_key, epoch)).permutation(len(contexts))
        picked = order[place * each : (place + 1) * each][list(team.share(each))]
        for part in np.array_split(np.sort(picked), max(len(picked) // 4, 1)):
            ids = torch.from_numpy(contexts[part].astype(np.int64))
            with mixed(recipe.bfloat16):
                logits = student(input_ids=ids, use_cache=False).logits
            wanted = torch.from_numpy(hidden[part]).float() @ head.T
            loss = distillation_loss(logits.float(), wanted, distance_weight(progress))
            yield loss * (len(part) / len(picked)), ids.numel()

    return losses


def distil(
    stage: str,
    student: LlamaForCausalLM,
    losses: Losses,
    budget: Budget,
    recipe: Recipe,
    out: Path,
    report: Report,
    stop_after: int | None,
    team: Team,
) -> Progress:
    """Trains a student on these losses with the recipe's rates. The checkpoint has the name of the stage."""
    return fit(
        stage,
        student,
        losses,
        budget,
        out / f"{stage}.pt",
        report,
        schedule=Schedule(1.0, 0.0, 0.03),
        muon_lr=recipe.muon_lr,
        adam_lr=recipe.adam_lr,
        bfloat16=recipe.bfloat16,
        save_every=recipe.save_every,
        stop_after=stop_after,
        team=team,
    )
