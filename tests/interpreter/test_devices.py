"""Tensors of several devices are refused by name before a launch, in every argument, nested ones included."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from oracles.logits_processor_cases import Request, arguments
from oracles.packed_trees import Shape, build
from oracles.proposal_cases import GOOD, int32
from torch import Tensor

from specdec_kernels import (
    distribution_stats,
    exact_match_verify,
    kv_slots,
    kv_stage,
    process_logits,
    recursive_rejection_verify,
    rejection_verify,
    tree_attention,
    tree_plan,
)

ELSEWHERE = "meta"
"""A device that no kernel serves stands for another GPU."""


def calls() -> list[tuple[Any, dict[str, Any]]]:
    """Returns operators with valid arguments."""
    processors = arguments([Request([3], [9], [0, 1], [-1, 0], (1.2, 0.5, 0.25), {7: 1.5}, {9: 4}, {4: 2})], 0, None)
    attention = build(Shape([3], [20]))
    names = ("query", "key_cache", "value_cache", "page_table", "lengths", "offsets", "ancestors")
    heads = {"sinks": torch.zeros(4), "scale": 0.1}
    links = {name: GOOD[name] for name in ("offsets", "first_child", "next_sibling")}
    rows = {"rows": int32([0]), "offsets": int32([0, 3]), "depth": int32([0, 1, 2]), "nodes": 3, "page_size": 16}
    chain = {name: each for name, each in GOOD.items() if name not in ("first_child", "next_sibling", "score_only")}
    new = torch.zeros(3, 2, 64)
    return [
        (tree_plan, {"parents": int32([-1, 0]), "offsets": int32([0, 2])}),
        (exact_match_verify, {"tokens": GOOD["tokens"], **links, "node_choice": GOOD["tokens"], "max_depth": 3}),
        (rejection_verify, chain | {"max_depth": 3}),
        (recursive_rejection_verify, GOOD),
        (process_logits, {"logits": torch.zeros(2, 12), **processors}),
        (tree_attention, dict(zip(names, (*attention.cache, attention.ancestors), strict=True)) | heads),
        (kv_slots, {"page_table": torch.ones(1, 9, dtype=torch.int32), "lengths": int32([7]), **rows}),
        (kv_stage, {"key": new, "value": new, **dict(zip(names[1:3], attention.cache[1:3], strict=True)),
                    "slots": torch.arange(3)}),
        (distribution_stats, {"logits": torch.zeros(1, 4), "temperature": torch.ones(1), "top_k": int32([0]),
                     "top_p": torch.ones(1), "min_p": torch.zeros(1)}),
    ]  # fmt: skip


@pytest.mark.usefixtures("on_triton")
@pytest.mark.parametrize("place", range(9))
def test_every_tensor_of_another_device_is_named(place: int) -> None:
    op, good = calls()[place]
    op(**good)
    first = next(iter(good))
    for name, value in list(good.items())[1:]:
        if isinstance(value, Tensor):
            strangers = {name: value.to(ELSEWHERE)}
        elif isinstance(value, tuple):
            strangers = {f"{name}[2]": (*value[:2], value[2].to(ELSEWHERE), *value[3:])}
        elif hasattr(value, "offsets"):
            strangers = {f"{name}.offsets": replace(value, offsets=value.offsets.to(ELSEWHERE))}
        else:
            continue
        for called, stranger in strangers.items():
            with pytest.raises(ValueError) as refused:
                op(**good | {name: stranger})
            assert str(refused.value) == (
                f"{op.name}: {called} is on {ELSEWHERE}; expected cpu like {first}; put all on one device with "
                '.to("...")'
            )
