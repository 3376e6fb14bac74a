"""Triton backend of process_logits_overlay: launch configurations and the call."""

from __future__ import annotations

import torch
from torch import Tensor

from ...overlay import Overlay
from ...triton_shared.aot_config import Variant
from ..process_logits.launch import FORBID_TYPES, SPARSE_TYPES, TREE_TYPES, ProcessorArguments
from ..process_logits.processors import Additions, Forced, NodePaths, Penalties, TokenMasks
from .reference import check, overlay_shape
from .triton_kernel import build_overlay

ENTRIES = 256
"""Table entries of one step over committed tokens or additions."""
WORDS = 1024
"""Words of 32 tokens that one step writes or counts."""
WARPS = 4
REGISTERS = 112
"""Registers per thread. By default an older ptxas aims at fewer and spills."""


def process_logits_overlay(
    logits: Tensor,
    paths: NodePaths,
    penalties: Penalties | None = None,
    additions: Additions | None = None,
    forced: Forced | None = None,
    masks: TokenMasks | None = None,
) -> Overlay:
    """Runs the operator in one launch."""
    check(logits, paths, penalties, additions, forced, masks)
    rows, vocab_size = logits.shape
    shape = overlay_shape(logits, paths, penalties, additions)
    if rows == 0 or paths.offsets.shape[0] == 1:
        return Overlay(torch.zeros(shape, dtype=torch.int32, device=logits.device), vocab_size)
    words = torch.empty(shape, dtype=torch.int32, device=logits.device)
    given = ProcessorArguments(paths, penalties, additions, forced, masks)
    build_overlay[(rows,)](
        logits, *given.tree, *given.penalties, *given.additions, *given.forced, *given.masks, words,
        given.num_requests, given.num_nodes, given.num_tables, given.num_additions, given.num_forced, given.num_masks,
        vocab_size, logits.stride(0), given.table_capacity, given.mask_words, shape[1], ENTRIES, WORDS, given.requests,
        given.has_nodes, penalties is not None, additions is not None, forced is not None, masks is not None,
        num_warps=WARPS, maxnreg=REGISTERS, enable_fp_fusion=False,
    )  # fmt: skip
    return Overlay(words, vocab_size)


def _variant(dtype: str, everyday: tuple[str, ...], nodes: bool = False) -> Variant:
    own = {"logits_ptr": f"*{dtype}", "vocab_size": "i32:16", "overlay_ptr": "*i32", "overlay_stride": "i32:16"}
    kinds = dict.fromkeys(("HAS_PENALTIES", "HAS_ADDITIONS", "HAS_FORCED", "HAS_MASKS"), True)
    return Variant(
        f"process_logits_overlay/build_overlay {dtype}{' of some nodes' if nodes else ''}",
        "process_logits_overlay.triton_kernel:build_overlay", own | TREE_TYPES | SPARSE_TYPES | FORBID_TYPES,
        {"TILE": ENTRIES, "WORDS": WORDS, "REQUESTS": 32, "HAS_NODES": nodes, **kinds}, WARPS, everyday=everyday,
        fusion=False, most_registers=REGISTERS,
    )  # fmt: skip


VARIANTS = [_variant("bf16", ("sm_90",)), _variant("fp16", ()), _variant("fp32", ()), _variant("bf16", (), nodes=True)]
