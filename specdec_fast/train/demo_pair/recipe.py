"""The demo pair's recipe: shapes, budgets and all other hyperparameters."""

from __future__ import annotations

from dataclasses import dataclass, field

from specdec_fast.train.demo_pair.model_shapes import DRAFT, TARGET, Shape
from specdec_fast.train.demo_pair.training_loop import Budget


@dataclass(frozen=True, slots=True)
class Recipe:
    """Hyperparameters of `specdec_fast.train.demo_pair.pipeline.run`.

    The defaults train a pair like the bundled one in a few hours. Its card describes where its own run differed.
    """

    target: Shape = TARGET
    draft: Shape = DRAFT
    start_layers: int = 4  # depth of the target before its layers are repeated
    seed: int = 0
    start_budget: Budget = field(default_factory=lambda: Budget(tokens=1_200_000))
    target_budget: Budget = field(default_factory=lambda: Budget(tokens=4_800_000))
    unlikelihood_budget: Budget = field(default_factory=lambda: Budget(tokens=600_000))
    draft_budget: Budget = field(default_factory=lambda: Budget(tokens=40_000_000))
    block: int = 1024  # tokens of a block
    blocks_per_step: int = 8
    # (share of the target's budget from which a length applies, length of a sequence)
    lengths: tuple[tuple[float, int], ...] = ((0.0, 256), (0.45, 512), (0.8, 1024))
    muon_lr: float = 0.012  # 0.02, usual for batches of half a million tokens, is too much for 8192
    adam_lr: float = 2.5e-3
    unlikelihood_rounds: int = 2  # consecutive rounds of that budget; the target is the mean of their weights
    repeat_blocks: int = 4  # unlikelihood: blocks of ordinary text per step
    repeat_muon_lr: float = 0.008
    repeat_adam_lr: float = 1.6e-3
    repeat_rows: int = 32  # unlikelihood: continuations per step
    repeat_prefix: int = 48
    repeat_length: int = 200
    repeat_weight: float = 1.3
    context: int = 512  # distillation: length of a context
    corpus_contexts: int = 8192  # distillation: contexts taken from the training text
    sampled_contexts: int = 2048  # distillation: contexts continued by the target itself
    contexts_per_step: int = 16
    measured_tokens: int = 16_000  # per domain, for alpha on held-out text
    continued_rows: int = 16  # held-out beginnings that the target continues, for alpha on its own text
    continued_tokens: int = 128
    workload_tokens: int = 200
    workers: int = 1  # training processes with one thread each
    bfloat16: bool = False  # matrix products in bfloat16, weights and sums in float32
    compiled: bool = True
    save_every: float = 60.0


@dataclass(frozen=True, slots=True)
class HybridRecipe(Recipe):
    """Hyperparameters of `specdec_fast.train.demo_pair.hybrid_pipeline.run_hybrid`.

    `target` has the sizes of the Llama that is converted, and `draft` those of its draft, which is kept.
    """

    context: int = 256
    corpus_contexts: int = 4096
    sampled_contexts: int = 1024
    mixers_budget: Budget = field(default_factory=lambda: Budget(tokens=375_000))
    mixers_blocks: int = 8  # mixers alone: blocks of `context` tokens per step
    mixers_muon_lr: float = 0.012
    mixers_adam_lr: float = 3e-3
    hybrid_budget: Budget = field(default_factory=lambda: Budget(tokens=2_625_000))
    contexts_per_step: int = 8
    muon_lr: float = 0.003  # the weights that are copied are trained already
    adam_lr: float = 1e-3


def tokened(target_tokens: int, draft_tokens: int) -> Recipe:
    """Returns the recipe with budgets in tokens, whose result does not depend on speed or interruptions.

    A short distillation writes only the contexts that it will use.

    Args:
        target_tokens: Training tokens of the target.
        draft_tokens: Distillation tokens of the draft.

    Returns:
        The recipe.
    """
    full = Recipe()
    share = min(draft_tokens / ((full.corpus_contexts + full.sampled_contexts) * full.context), 1.0)
    return Recipe(
        corpus_contexts=max(round(share * full.corpus_contexts), full.contexts_per_step),
        sampled_contexts=max(round(share * full.sampled_contexts), full.contexts_per_step),
        start_budget=Budget(tokens=target_tokens // 5),
        target_budget=Budget(tokens=target_tokens - target_tokens // 5),
        unlikelihood_budget=Budget(tokens=max(target_tokens // 10, 1)),
        draft_budget=Budget(tokens=draft_tokens),
    )


def timed(minutes: float) -> Recipe:
    """Returns the recipe with a total budget in minutes."""
    share = {"start": 0.06, "target": 0.62, "unlikelihood": 0.14, "draft": 0.18}
    seconds = {stage: 60.0 * minutes * part for stage, part in share.items()}
    return Recipe(
        start_budget=Budget(seconds=seconds["start"]),
        target_budget=Budget(seconds=seconds["target"]),
        unlikelihood_budget=Budget(seconds=seconds["unlikelihood"] / Recipe().unlikelihood_rounds),
        draft_budget=Budget(seconds=seconds["draft"]),
    )


def hybrid_tokened(target_tokens: int) -> HybridRecipe:
    """Returns the recipe of the hybrid target with budgets in tokens. A short distillation writes few contexts.

    Args:
        target_tokens: Training tokens of the hybrid target. The mixers alone get an eighth of them.

    Returns:
        The recipe.
    """
    full, alone = HybridRecipe(), target_tokens // 8
    share = min((target_tokens - alone) / ((full.corpus_contexts + full.sampled_contexts) * full.context), 1.0)
    return HybridRecipe(
        corpus_contexts=max(round(share * full.corpus_contexts), full.contexts_per_step),
        sampled_contexts=max(round(share * full.sampled_contexts), full.contexts_per_step),
        mixers_budget=Budget(tokens=alone),
        hybrid_budget=Budget(tokens=target_tokens - alone),
    )


def hybrid_timed(minutes: float) -> HybridRecipe:
    """Returns the recipe of the hybrid target with a total budget in minutes."""
    return HybridRecipe(
        mixers_budget=Budget(seconds=60.0 * minutes * 0.15), hybrid_budget=Budget(seconds=60.0 * minutes * 0.85)
    )
