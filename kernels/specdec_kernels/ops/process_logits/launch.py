"""Triton backend of process_logits: launch configurations and the call."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...triton_shared.aot_config import Variant, size_type
from ...triton_shared.jit import lanes_for, unaligned_vocab
from .processors import Additions, Forced, NodePaths, Penalties, TokenMasks
from .reference import check
from .triton_kernel import apply_sparse, forbid_tokens

ENTRIES = 256
"""Table entries of one step over committed tokens or additions."""
TILE = 4096
"""Logits of one program of `forbid_tokens`."""
SPARSE_WARPS, FORBID_WARPS = 2, 8


class ProcessorArguments:
    """Returns the kernels' arguments of node paths and logits processors. Absent tensors become dummies, never read."""

    def __init__(
        self,
        paths: NodePaths,
        penalties: Penalties | None,
        additions: Additions | None,
        forced: Forced | None,
        masks: TokenMasks | None,
    ) -> None:
        nodes = paths.offsets if paths.nodes is None else paths.nodes
        tree = (paths.tokens, paths.parents, paths.offsets, paths.roots, nodes)
        self.tree = [part.contiguous() for part in tree]
        self.num_requests, self.num_nodes = paths.offsets.shape[0] - 1, paths.tokens.shape[0]
        self.has_nodes, self.requests = paths.nodes is not None, lanes_for(self.num_requests)
        self._absent = paths.offsets
        self.penalties = self._fields(penalties, "factors", "rows", "ids", "counts", "sizes")
        self.num_tables, self.table_capacity = (0, 0) if penalties is None else penalties.ids.shape
        self.additions = self._fields(additions, "offsets", "ids", "values", "until")
        self.num_additions = 0 if additions is None else additions.ids.shape[0]
        self.forced = self._fields(forced, "offsets", "positions", "ids")
        self.num_forced = 0 if forced is None else forced.ids.shape[0]
        self.masks = self._fields(masks, "words", "index")
        self.num_masks, self.mask_words = (0, 0) if masks is None else masks.words.shape

    def _fields(self, processor: Any, *names: str) -> list[Tensor]:
        return [self._absent if processor is None else getattr(processor, name).contiguous() for name in names]


def process_logits(
    logits: Tensor,
    paths: NodePaths,
    penalties: Penalties | None = None,
    additions: Additions | None = None,
    forced: Forced | None = None,
    masks: TokenMasks | None = None,
) -> Tensor:
    """Runs the operator in up to two launches."""
    check(logits, paths, penalties, additions, forced, masks)
    (rows, vocab_size), stride = logits.shape, logits.stride(0)
    if rows == 0 or paths.offsets.shape[0] == 1:
        return logits
    given = ProcessorArguments(paths, penalties, additions, forced, masks)
    if penalties is not None or additions is not None:
        apply_sparse[(rows,)](
            logits, *given.tree, *given.penalties, *given.additions, given.num_requests, given.num_nodes,
            given.num_tables, given.num_additions, vocab_size, stride, given.table_capacity, ENTRIES, given.requests,
            given.has_nodes, penalties is not None, additions is not None, num_warps=SPARSE_WARPS,
            enable_fp_fusion=False,
        )  # fmt: skip
    if forced is not None or masks is not None:
        forbid_tokens[(rows, -(-vocab_size // TILE))](
            logits, *given.tree, *given.forced, *given.masks, given.num_requests, given.num_nodes, given.num_forced,
            given.num_masks, vocab_size, stride, given.mask_words, TILE, given.requests, given.has_nodes,
            forced is not None, masks is not None, unaligned_vocab(vocab_size, stride), num_warps=FORBID_WARPS,
            enable_fp_fusion=False,
        )  # fmt: skip
    return logits


TREE_TYPES = {
    "tokens_ptr": "*i64", "parents_ptr": "*i32", "offsets_ptr": "*i32", "root_positions_ptr": "*i32",
    "nodes_ptr": "*i32", "num_requests": "i32", "num_nodes": "i32", "logits_stride": "i32:16",
}  # fmt: skip
SPARSE_TYPES = {
    "factors_ptr": "*fp32", "table_rows_ptr": "*i32", "table_ids_ptr": "*i32", "table_counts_ptr": "*i32",
    "table_sizes_ptr": "*i32", "add_offsets_ptr": "*i32", "add_ids_ptr": "*i32", "add_values_ptr": "*fp32",
    "add_until_ptr": "*i32", "num_tables": "i32", "num_additions": "i32", "table_capacity": "i32",
}  # fmt: skip
FORBID_TYPES = {
    "forced_offsets_ptr": "*i32", "forced_positions_ptr": "*i32", "forced_ids_ptr": "*i32", "mask_words_ptr": "*i32",
    "mask_index_ptr": "*i32", "num_forced": "i32", "num_masks": "i32", "mask_words": "i32",
}  # fmt: skip
"""Types of the kernels' arguments, here and in process_logits_overlay."""


def _variants(dtype: str, everyday: bool, nodes: bool = False, unaligned: bool = False) -> list[Variant]:
    shared = {"logits_ptr": f"*{dtype}", "vocab_size": size_type(unaligned)} | TREE_TYPES
    architectures, kernel = ("sm_90",) if everyday else (), "process_logits.triton_kernel"
    constants = {"REQUESTS": 32, "HAS_NODES": nodes}
    sparse = {"TILE": ENTRIES, "HAS_PENALTIES": True, "HAS_ADDITIONS": True}
    forbid = {"TILE": TILE, "HAS_FORCED": True, "HAS_MASKS": True, "UNALIGNED": unaligned}
    name = f"{dtype}{' of some nodes' if nodes else ''}{' unaligned vocabulary' if unaligned else ''}"
    return [
        Variant(f"process_logits/apply_sparse {name}", f"{kernel}:apply_sparse", shared | SPARSE_TYPES,
                constants | sparse, SPARSE_WARPS, everyday=architectures, fusion=False),
        Variant(f"process_logits/forbid_tokens {name}", f"{kernel}:forbid_tokens", shared | FORBID_TYPES,
                constants | forbid, FORBID_WARPS, everyday=architectures, fusion=False),
    ]  # fmt: skip


VARIANTS = [
    *_variants("fp32", True),
    *_variants("bf16", False),
    *_variants("fp16", False),
    *_variants("bf16", False, nodes=True),
    _variants("bf16", False, unaligned=True)[-1],
]
