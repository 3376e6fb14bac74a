"""Triton backend of process_logits: launch configurations and the call."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...triton_shared.jit import lanes_for, unaligned_vocab
from ...triton_shared.variant import Variant, size_type
from .processors import Additions, Forced, NodePaths, Penalties, TokenMasks
from .reference import check
from .triton_kernel import sparse, whole

ENTRIES = 256
"""Table entries of one step over committed tokens or additions."""
TILE = 4096
"""Logits that one program bars."""
SPARSE_WARPS, WHOLE_WARPS = 2, 8


def process_logits(
    logits: Tensor,
    paths: NodePaths,
    penalties: Penalties | None = None,
    additions: Additions | None = None,
    forced: Forced | None = None,
    masks: TokenMasks | None = None,
) -> Tensor:
    check(logits, paths, penalties, additions, forced, masks)
    (rows, vocab), requests, packed = logits.shape, paths.offsets.shape[0] - 1, paths.tokens.shape[0]
    if rows == 0 or requests == 0:
        return logits

    def given(edits: Any, *names: str) -> list[Tensor]:
        """Fields of edits, stand-ins where there are none."""
        return [paths.offsets if edits is None else getattr(edits, name).contiguous() for name in names]

    def count(edits: Any, name: str, axis: int = 0) -> int:
        return 0 if edits is None else getattr(edits, name).shape[axis]

    nodes = paths.offsets if paths.nodes is None else paths.nodes.contiguous()
    tree = [part.contiguous() for part in (paths.tokens, paths.parents, paths.offsets, paths.roots)]
    places = lanes_for(requests)
    if penalties is not None or additions is not None:
        sparse[(rows,)](
            logits, *tree, nodes, *given(penalties, "factors", "rows", "ids", "counts", "sizes"),
            *given(additions, "offsets", "ids", "values", "until"), requests, packed, count(penalties, "ids"),
            count(additions, "ids"), vocab, logits.stride(0), count(penalties, "ids", 1), ENTRIES, places,
            paths.nodes is not None, penalties is not None, additions is not None, num_warps=SPARSE_WARPS,
            enable_fp_fusion=False,
        )  # fmt: skip
    if forced is not None or masks is not None:
        whole[(rows, -(-vocab // TILE))](
            logits, *tree, nodes, *given(forced, "offsets", "positions", "ids"), *given(masks, "words", "index"),
            requests, packed, count(forced, "ids"), count(masks, "words"), vocab, logits.stride(0),
            count(masks, "words", 1), TILE, places, paths.nodes is not None, forced is not None, masks is not None,
            unaligned_vocab(vocab, logits.stride(0)), num_warps=WHOLE_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return logits


def _variants(dtype: str, everyday: bool, nodes: bool = False, unaligned: bool = False) -> list[Variant]:
    tree = {
        "logits": f"*{dtype}", "tokens": "*i64", "parents": "*i32", "offsets": "*i32", "roots": "*i32",
        "nodes": "*i32", "requests": "i32", "packed": "i32", "entries": "i32", "vocab": size_type(unaligned),
        "stride": "i32:16",
    }  # fmt: skip
    tables = {
        "factors": "*fp32", "rows": "*i32", "ids": "*i32", "counts": "*i32", "sizes": "*i32", "add_offsets": "*i32",
        "add_ids": "*i32", "values": "*fp32", "until": "*i32", "tables": "i32", "capacity": "i32",
    }  # fmt: skip
    masks = {
        "forced_offsets": "*i32", "forced_positions": "*i32", "forced_ids": "*i32", "words": "*i32", "index": "*i32",
        "masks": "i32", "width": "i32",
    }  # fmt: skip
    chosen, kernel = ("sm_90",) if everyday else (), "process_logits.triton_kernel"
    shared = {"REQUESTS": 32, "NODES": nodes}
    name = f"{dtype}{' of some nodes' if nodes else ''}{' unaligned vocabulary' if unaligned else ''}"
    return [
        Variant(f"process_logits/sparse {name}", f"{kernel}:sparse", tree | tables,
                shared | {"TILE": ENTRIES, "PENALTIES": True, "ADDITIONS": True}, SPARSE_WARPS, everyday=chosen,
                fusion=False),
        Variant(f"process_logits/whole {name}", f"{kernel}:whole", tree | masks,
                shared | {"TILE": TILE, "FORCED": True, "MASKS": True, "UNALIGNED": unaligned}, WHOLE_WARPS,
                everyday=chosen, fusion=False),
    ]  # fmt: skip


VARIANTS = [
    *_variants("fp32", True),
    *_variants("bf16", False),
    *_variants("fp16", False),
    *_variants("bf16", False, nodes=True),
    _variants("bf16", False, unaligned=True)[-1],
]
