"""Engines of tiny models with every drafter that takes part in CUDA-graph steps, on any device."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from oracles import heads, hybrid_models, models
from specdec_fast import Engine, HuggingFaceTarget, SamplingParams, get_drafter

KINDS = (
    "none", "draft_model", "eagle", "eagle dynamic", "eagle3", "eagle3 dynamic", "mtp", "medusa", "blockwise",
)  # fmt: skip
"""Drafters by name; "dynamic": trees that grow by the scores of their nodes."""
PROMPTS = (1, 5, 17, 40)
"""Lengths of the prompts of `texts`."""


def drafter(kind: str, target: HuggingFaceTarget, folder: Path) -> Any:
    """The drafter of a kind for a target over the tiny Llama, or None.

    Args:
        kind: One of `KINDS`.
        target: The target; the drafter is on its device.
        folder: Where the weights of heads are written.
    """
    name, _, dynamic = kind.partition(" ")
    if name == "none":
        return None
    if name in models.HEADS:
        return get_drafter(name)(target, models.HEADS[name](target).to(target.device))
    if name == "draft_model":
        small = HuggingFaceTarget(
            models.kin("llama").to(target.device), max_length=target.max_length, max_rows=target.cache.max_rows
        )
        return get_drafter(name)(small, num_draft_tokens=4, pick="coupled")
    return get_drafter(name)(target, **heads.options(name, folder), depth=3 if dynamic else 0)


def engine(kind: str, device: str, folder: Path, mode: str = "graph", max_rows: int = 4) -> Engine:
    """An engine of tiny models on a device."""
    target = HuggingFaceTarget(models.own("llama").to(device), max_length=128, max_rows=max_rows)
    return Engine(target, drafter(kind, target, folder), step_mode=mode)


def hybrid_engine(family: str, device: str, mode: str, drafts: bool) -> Engine:
    """An engine of a tiny model with recurrent layers, alone or with a draft model without them."""
    own = copy.deepcopy(hybrid_models.model(family)), models.kin("llama")
    target, draft = (HuggingFaceTarget(each.to(device), max_length=128, max_rows=2) for each in own)
    drafter = get_drafter("draft_model")(draft, num_draft_tokens=4, pick="coupled") if drafts else None
    return Engine(target, drafter, step_mode=mode)


def requests(temperature: float) -> list[SamplingParams]:
    """Sampling parameters of requests that end at different times."""
    return [
        SamplingParams(temperature=temperature, seed=at, max_new_tokens=9 + 4 * at, top_p=0.95 if temperature else 1.0)
        for at in range(len(PROMPTS))
    ]


def texts(made: Engine, temperature: float = 0.8, lengths: Sequence[int] = PROMPTS) -> list[list[int]]:
    """Runs requests of which half arrive after the first step, and returns their tokens."""
    wanted = list(zip(lengths, requests(temperature)))
    half = len(wanted) // 2
    handles = [made.submit(models.prompt(length), params) for length, params in wanted[:half]]
    made.step()
    handles += [made.submit(models.prompt(length), params) for length, params in wanted[half:]]
    while not made.idle:
        made.step()
    return [handle.tokens for handle in handles]
