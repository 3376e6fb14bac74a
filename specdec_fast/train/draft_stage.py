"""Stage 4: distil the draft from the target's own distribution."""
from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from specdec_fast.train.data import Tokens, blocks
from specdec_fast.train.loop import Progress, Report, Schedule, fit
from specdec_fast.train.measure import continue_text
from specdec_fast.train.models import build
from specdec_fast.train.recipe import Recipe
from specdec_fast.train.target_stage import load_model

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM


# Brings the distance to the size of the cross-entropy, so that the learning rates stay right.
DISTANCE_SCALE = 4.0


def distillation_loss(draft_logits: Tensor, target_logits: Tensor, distance_weight: Tensor | float) -> Tensor:
    """Cross-entropy against the target's distribution mixed with the total variation distance; logits [N, V].

    1 - alpha is exactly that distance, so its share grows towards the end. Zhou et al. 2024, "DistillSpec"
    (arXiv:2310.08461), section 3; Leviathan et al. 2023 (arXiv:2211.17192), section 3.
    """
    p = target_logits.softmax(-1)
    log_q = draft_logits.log_softmax(-1)
    cross_entropy = -(p * log_q).sum(-1).mean()
    distance = 0.5 * (p - log_q.exp()).abs().sum(-1).mean()
    return (1.0 - distance_weight) * cross_entropy + distance_weight * DISTANCE_SCALE * distance


def start_draft(draft: LlamaForCausalLM, target: LlamaForCausalLM) -> None:
    """Give the draft the best low-rank copy of the target's tied embedding, in place."""
    u, s, _ = torch.linalg.svd(target.model.embed_tokens.weight.float(), full_matrices=False)
    width = draft.config.hidden_size
    draft.model.embed_tokens.weight.data.copy_(u[:, :width] * s[:width])
    for layer in draft.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)


@torch.no_grad()
def write_contexts(recipe: Recipe, target: LlamaForCausalLM, out: Path, report: Report) -> None:
    """Store contexts and the target's last hidden states there, resumably: contexts.npy, hidden.npy, contexts.count.

    Contexts are training text and, for a share, text the target itself continues at temperature 1 or greedily: in use
    the draft sees nothing else. Hidden states take a quarter of the memory of logits and give them by one product.
    """
    row = Tokens.load(out / "tokens.npz").train
    total, length = recipe.corpus_contexts + recipe.sampled_contexts, recipe.context
    mark = out / "contexts.count"
    written = int(mark.read_text()) if mark.exists() else 0
    mode = "r+" if written else "w+"
    contexts = np.lib.format.open_memmap(out / "contexts.npy", mode, np.int16, (total, length))
    hidden = np.lib.format.open_memmap(out / "hidden.npy", mode, np.float16, (total, length, recipe.target.hidden))
    while written < total:
        count = min(8 if written < recipe.corpus_contexts else 32, total - written)
        if written < recipe.corpus_contexts:
            count = min(count, recipe.corpus_contexts - written)
            start = 1_000_000 * 8 + written
            ids = torch.cat([blocks(row, start + i, 1, length, recipe.seed + 1) for i in range(count)])[:, :length]
        else:
            generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + written)
            prefix = torch.cat([blocks(row, 1_000_000 * 9 + written + i, 1, length, recipe.seed + 1)
                                for i in range(count)])[:, :length // 4]
            greedy = (written // 32) % 3 == 2
            ids = continue_text(target, prefix, length - prefix.shape[1], 0.0 if greedy else 1.0, generator)
        states = target.model(input_ids=ids, use_cache=False).last_hidden_state
        contexts[written:written + count] = ids.numpy()
        hidden[written:written + count] = states.to(torch.float16).numpy()
        written += count
        contexts.flush()
        partial = mark.with_suffix(".partial")
        partial.write_text(str(written))
        os.replace(partial, mark)
        report("contexts", written / total, float("nan"), written * length, float("nan"), float("nan"))


def train_draft(recipe: Recipe, out: Path, report: Report, stop_after: int | None = None) -> Progress:
    """Distil the draft from the final target. Checkpoint: draft.pt."""
    target = load_model(build(recipe.target, recipe.seed), out / "final.pt")
    write_contexts(recipe, target, out, report)
    contexts = np.load(out / "contexts.npy", mmap_mode="r")
    hidden = np.load(out / "hidden.npy", mmap_mode="r")
    draft = build(recipe.draft, recipe.seed)
    start_draft(draft, target)
    head = target.lm_head.weight.detach()

    def loss(ids: Tensor, states: Tensor, distance_weight: Tensor) -> Tensor:
        logits = draft(input_ids=ids, use_cache=False).logits
        return distillation_loss(logits, states.float() @ head.T, distance_weight)

    compiled = torch.compile(loss, dynamic=False) if recipe.compiled else loss
    per_epoch = max(len(contexts) // recipe.contexts_per_step, 1)

    def losses(step: int, progress: float) -> Iterator[tuple[Tensor, int]]:
        epoch, place = divmod(step, per_epoch)
        order = np.random.default_rng((recipe.seed, 11, epoch)).permutation(len(contexts))
        picked = np.sort(order[place * recipe.contexts_per_step:(place + 1) * recipe.contexts_per_step])
        weight = torch.tensor(min(max((progress - 0.4) / 0.4, 0.0), 1.0) * 0.7)
        parts = np.array_split(picked, max(len(picked) // 4, 1))
        for part in parts:
            ids = torch.from_numpy(contexts[part].astype(np.int64))
            states = torch.from_numpy(hidden[part])
            yield compiled(ids, states, weight) * (len(part) / len(picked)), ids.numel()

    return fit("draft", draft, losses, recipe.draft_budget, out / "draft.pt", report, schedule=Schedule(1.0, 0.0, 0.03),
               muon_lr=recipe.muon_lr, adam_lr=recipe.adam_lr, save_every=recipe.save_every, stop_after=stop_after)
