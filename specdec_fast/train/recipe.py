"""The demo pair's recipe: shapes, budgets and everything else a run depends on."""

from __future__ import annotations

from dataclasses import dataclass, field

from specdec_fast.train.loop import Budget
from specdec_fast.train.models import DRAFT, TARGET, Shape


@dataclass(frozen=True, slots=True)
class Recipe:
    """What `specdec_fast.train.demo_pair.run` does; the defaults are those of the bundled pair."""

    target: Shape = TARGET
    draft: Shape = DRAFT
    start_layers: int = 4  # the target begins this shallow and is grown by stacking
    seed: int = 0
    start_budget: Budget = field(default_factory=lambda: Budget(tokens=4_000_000))
    target_budget: Budget = field(default_factory=lambda: Budget(tokens=4_000_000))
    unlikelihood_budget: Budget = field(default_factory=lambda: Budget(seconds=360.0))
    draft_budget: Budget = field(default_factory=lambda: Budget(tokens=16_000_000))
    block: int = 1024  # tokens of a block
    blocks_per_step: int = 4
    short: int = 512  # length of a sequence before the last part of the run
    long_from: float = 0.75  # share of the target's budget after which sequences are whole blocks
    muon_lr: float = 0.008  # 0.02, usual for batches of half a million tokens, is too much for 4096
    adam_lr: float = 2e-3
    repeat_blocks: int = 2  # unlikelihood: blocks of ordinary text per step
    repeat_rows: int = 16  # unlikelihood: continuations per step
    repeat_prefix: int = 48
    repeat_length: int = 112
    repeat_weight: float = 1.0
    context: int = 512  # distillation: length of a context
    corpus_contexts: int = 384  # distillation: contexts taken from the training text
    sampled_contexts: int = 64  # distillation: contexts continued by the target itself
    contexts_per_step: int = 4
    measured_tokens: int = 16_000  # per domain, for alpha on held-out text
    continued_rows: int = 16  # held-out beginnings the target continues, for alpha in use
    continued_tokens: int = 128
    workload_tokens: int = 200
    workers: int = 1  # processes that train together, one thread each
    compiled: bool = True
    save_every: float = 60.0


def tokened(target_tokens: int, draft_tokens: int) -> Recipe:
    """The recipe with budgets in tokens: the same result wherever it runs and however often it is
    interrupted.
    """
    return Recipe(
        start_budget=Budget(tokens=target_tokens // 2),
        target_budget=Budget(tokens=target_tokens // 2),
        unlikelihood_budget=Budget(tokens=max(target_tokens // 25, 1)),
        draft_budget=Budget(tokens=draft_tokens),
    )


def timed(minutes: float) -> Recipe:
    """The recipe with budgets in minutes of training altogether."""
    share = {"start": 0.28, "target": 0.40, "unlikelihood": 0.08, "draft": 0.20}
    seconds = {stage: 60.0 * minutes * part for stage, part in share.items()}
    return Recipe(
        start_budget=Budget(seconds=seconds["start"]),
        target_budget=Budget(seconds=seconds["target"]),
        unlikelihood_budget=Budget(seconds=seconds["unlikelihood"]),
        draft_budget=Budget(seconds=seconds["draft"]),
    )
