"""Stages 2 and 3 of the hybrid target: trains its mixers to do what attention did, then distils the whole model.

Tests: tests/train/demo_pair/test_hybrid_pipeline.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from specdec_fast.train.demo_pair.draft_stage import distil, distillation_losses, write_contexts
from specdec_fast.train.demo_pair.hybrid_conversion import convert
from specdec_fast.train.demo_pair.model_shapes import build_hybrid, mixed
from specdec_fast.train.demo_pair.recipe import HybridRecipe
from specdec_fast.train.demo_pair.target_stage import compile_layers, load_model
from specdec_fast.train.demo_pair.training_loop import Progress, Report, Schedule, fit
from specdec_fast.train.demo_pair.worker_processes import Team
from specdec_fast.train.token_batches import Tokens, blocks

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

TEACHER = "demo-target"  # folder of the Llama in the work folder


def load_teacher(out: Path) -> LlamaForCausalLM:
    """Loads the Llama that is converted, in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(out / TEACHER, dtype=torch.float32).eval()


def mixers_of(model: Any) -> list[Any]:
    """Returns the attention or the delta rule of each layer."""
    return [getattr(layer, "self_attn", None) or layer.linear_attn for layer in model.model.layers]


@torch.no_grad()
def attention_calls(teacher: LlamaForCausalLM, ids: Tensor) -> list[tuple[Tensor, Any, Tensor]]:
    """Returns the input [B, T, C], the position embeddings and the output [B, T, C] of each layer's attention."""
    calls: list[tuple[Tensor, Any, Tensor]] = []

    def note(_module: nn.Module, _args: Any, named: dict[str, Any], output: Any) -> None:
        calls.append((named["hidden_states"], named["position_embeddings"], output[0]))

    hooks = [mixer.register_forward_hook(note, with_kwargs=True) for mixer in mixers_of(teacher)]
    try:
        teacher.model(input_ids=ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def mixer_loss(mixer: Any, inputs: Tensor, positions: Any, wanted: Tensor) -> Tensor:
    """Computes the squared distance of a mixer's output to that of attention, as a share of the latter's size.

    Args:
        mixer: The mixer.
        inputs: [B, T, C].
        positions: Position embeddings.
        wanted: Output of the attention, [B, T, C].

    Returns:
        The scalar loss.

    Source:
        Bick et al. 2024, "Transformers to SSMs" (arXiv:2408.10189), section 4.2, which aligns hidden states layer by
        layer.
    """
    length = inputs.shape[1]
    mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
    is_attention = hasattr(mixer, "q_proj")
    given = {"position_embeddings": positions, "attention_mask": mask} if is_attention else {}
    output = mixer(hidden_states=inputs, **given)
    output = output[0] if is_attention else output
    return (output.float() - wanted).square().sum() / wanted.square().sum()


def train_mixers(
    recipe: HybridRecipe, out: Path, report: Report, stop_after: int | None = None, team: Team = Team()
) -> Progress:
    """Converts the Llama, and trains all mixers at once, each on the inputs that its attention had: mixers.pt.

    No gradient crosses a layer, so that this takes few steps.

    Args:
        recipe: The recipe.
        out: Work folder.
        report: Called after every step.
        stop_after: Ends this call after that many steps.
        team: This process's place among the training processes.

    Returns:
        The progress of the stage.
    """
    row = Tokens.load(out / "tokens.npz").train
    teacher, hybrid = load_teacher(out), build_hybrid(recipe.target, recipe.seed)
    count, length = recipe.mixers_blocks, recipe.context
    convert(teacher, hybrid, blocks(row, 0, count, length, recipe.seed + 3)[:, :length])
    hybrid.set_attn_implementation("eager")
    hybrid.requires_grad_(False)
    mixers = mixers_of(hybrid)
    for mixer in mixers:
        mixer.requires_grad_(True)
        if recipe.compiled:
            mixer.compile(dynamic=False)

    def losses(step: int, _progress: float) -> Iterator[tuple[Tensor, int]]:
        mine = list(team.share(count))
        ids = blocks(row, step, count, length, recipe.seed + 3)[mine][:, :length]
        calls = attention_calls(teacher, ids)
        for number, (mixer, call) in enumerate(zip(mixers, calls, strict=True)):
            with mixed(recipe.bfloat16):
                loss = mixer_loss(mixer, *call)
            yield loss / len(mixers), 0 if number else ids.numel()

    return fit(
        "mixers",
        hybrid,
        losses,
        recipe.mixers_budget,
        out / "mixers.pt",
        report,
        schedule=Schedule(1.0, 0.1, 0.05),
        muon_lr=recipe.mixers_muon_lr,
        adam_lr=recipe.mixers_adam_lr,
        bfloat16=recipe.bfloat16,
        save_every=recipe.save_every,
        stop_after=stop_after,
        team=team,
    )


def train_hybrid(
    recipe: HybridRecipe, out: Path, report: Report, stop_after: int | None = None, team: Team = Team()
) -> Progress:
    """Distils the hybrid model from the whole distribution of the Llama: hybrid.pt.

    Args:
        recipe: The recipe.
        out: Work folder.
        report: Called after every step.
        stop_after: Ends this call after that many steps.
        team: This process's place among the training processes.

    Returns:
        The progress of the stage.

    Source:
        Wang et al. 2024 (arXiv:2408.15237), section 3.
    """
    teacher = load_teacher(out)
    write_contexts(recipe, teacher, out, report, team)
    hybrid = load_model(build_hybrid(recipe.target, recipe.seed), out / "mixers.pt").train()
    if recipe.compiled:
        compile_layers(hybrid)
    losses = distillation_losses(
        recipe,
        out,
        teacher.lm_head.weight.detach(),
        hybrid,
        team,
        order_key=13,
        distance_weight=lambda _progress: 0.0,
    )
    return distil("hybrid", hybrid, losses, recipe.hybrid_budget, recipe, out, report, stop_after, team)
