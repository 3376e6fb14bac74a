"""Triton backend of process_logits_overlay: launch configurations and the call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...overlay import Overlay
from ...triton_shared.jit import lanes_for
from ...triton_shared.variant import Variant
from ..process_logits.processors import Additions, Forced, NodePaths, Penalties, TokenMasks
from .reference import cells_of, check
from .triton_kernel import fold

ENTRIES = 256
"""Table entries of one step over committed tokens or additions."""
WORDS = 1024
"""Words of 32 tokens that one step writes or counts."""
WARPS = 4
REGISTERS = 112
"""Per thread. Left to itself an older ptxas aims at fewer, and spills."""


def process_logits_overlay(
    logits: Tensor,
    paths: NodePaths,
    penalties: Penalties | None = None,
    additions: Additions | None = None,
    forced: Forced | None = None,
    masks: TokenMasks | None = None,
) -> Overlay:
    check(logits, paths, penalties, additions, forced, masks)
    (rows, vocab), requests, packed = logits.shape, paths.offsets.shape[0] - 1, paths.tokens.shape[0]
    shape = cells_of(logits, paths, penalties, additions)
    if rows == 0 or requests == 0:
        return Overlay(torch.zeros(shape, dtype=torch.int32, device=logits.device), vocab)
    cells = torch.empty(shape, dtype=torch.int32, device=logits.device)

    def given(edits: Any, *names: str) -> list[Tensor]:
        """Fields of edits, stand-ins where there are none."""
        return [paths.offsets if edits is None else getattr(edits, name).contiguous() for name in names]

    def count(edits: Any, name: str, axis: int = 0) -> int:
        return 0 if edits is None else getattr(edits, name).shape[axis]

    nodes = paths.offsets if paths.nodes is None else paths.nodes.contiguous()
    tree = [part.contiguous() for part in (paths.tokens, paths.parents, paths.offsets, paths.roots)]
    fold[(rows,)](
        logits, *tree, nodes, *given(penalties, "factors", "rows", "ids", "counts", "sizes"),
        *given(additions, "offsets", "ids", "values", "until"), *given(forced, "offsets", "positions", "ids"),
        *given(masks, "words", "index"), cells, requests, packed, count(penalties, "ids"), count(additions, "ids"),
        count(forced, "ids"), count(masks, "words"), vocab, logits.stride(0), count(penalties, "ids", 1),
        count(masks, "words", 1), shape[1], ENTRIES, WORDS, lanes_for(requests), paths.nodes is not None,
        penalties is not None, additions is not None, forced is not None, masks is not None, num_warps=WARPS,
        maxnreg=REGISTERS, enable_fp_fusion=False,
    )  # fmt: skip
    return Overlay(cells, vocab)


def _variant(dtype: str, everyday: tuple[str, ...], nodes: bool = False) -> Variant:
    integers = (
        "parents", "offsets", "roots", "nodes", "rows", "ids", "counts", "sizes", "add_offsets", "add_ids", "until",
        "forced_offsets", "forced_positions", "forced_ids", "words", "index", "cells",
    )  # fmt: skip
    numbers = ("requests", "packed", "tables", "entries", "listed", "masks", "capacity", "width")
    arguments = {
        "logits": f"*{dtype}", "tokens": "*i64", "factors": "*fp32", "values": "*fp32", "vocab": "i32:16",
        "stride": "i32:16", "room": "i32:16", **dict.fromkeys(integers, "*i32"), **dict.fromkeys(numbers, "i32"),
    }  # fmt: skip
    kinds = dict.fromkeys(("PENALTIES", "ADDITIONS", "FORCED", "MASKS"), True)
    return Variant(
        f"process_logits_overlay/fold {dtype}{' of some nodes' if nodes else ''}",
        "process_logits_overlay.triton_kernel:fold", arguments,
        {"TILE": ENTRIES, "WORDS": WORDS, "REQUESTS": 32, "NODES": nodes, **kinds}, WARPS, everyday=everyday,
        fusion=False, most_registers=REGISTERS,
    )  # fmt: skip


VARIANTS = [_variant("bf16", ("sm_90",)), _variant("fp16", ()), _variant("fp32", ()), _variant("bf16", (), nodes=True)]
