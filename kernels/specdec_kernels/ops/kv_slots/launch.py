"""Triton backend of kv_slots: argument checks, the launch and its variants."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...dispatch.workspace import TensorSpec, result_tensors
from ...triton_shared.aot_config import Variant


def kv_slots(
    page_table: Tensor,
    lengths: Tensor,
    rows: Tensor,
    offsets: Tensor,
    depth: Tensor | None,
    nodes: int,
    page_size: int,
    advance: bool = False,
    *,
    out: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Runs the operator in one launch. Data is not checked; nodes that do not fit go to the trash."""
    from .triton_kernel import assign_slots

    given = {"page_table": page_table, "lengths": lengths, "rows": rows, "offsets": offsets, "depth": depth}
    for name, each in given.items():
        if each is None:
            continue
        axes = 2 if each is page_table else 1
        if each.dtype != torch.int32 or each.ndim != axes or not each.is_contiguous():
            raise ValueError(
                f"kv_slots: {name} is {each.dtype} {list(each.shape)}; expected contiguous int32 of {axes} dimensions"
            )
    (capacity, columns), batch = page_table.shape, rows.shape[0]
    if lengths.shape[0] != capacity:
        raise ValueError(
            f"kv_slots: lengths is {list(lengths.shape)}; expected [{capacity}], one per row of page_table"
        )
    if offsets.shape[0] != batch + 1 or (depth is not None and depth.shape[0] != nodes) or nodes < 0 or page_size < 1:
        raise ValueError(
            f"kv_slots: rows {list(rows.shape)}, offsets {list(offsets.shape)} and depth do not fit {nodes} nodes of "
            f"page size {page_size}; expected [B], [B + 1], [nodes] or None, and a page size of at least 1"
        )
    wide = ((nodes,), torch.int64)
    specs: list[TensorSpec] = [((batch, columns), torch.int32), ((batch,), torch.int32), wide, wide]
    table, own, slots, positions = result_tensors("kv_slots", out, specs, rows.device)
    assign_slots[(batch + 1,)](
        page_table, lengths, rows, offsets, depth, table, own, slots, positions,
        batch, nodes, capacity, columns,
        PAGE_SIZE=page_size, ADVANCE=advance, TREE=depth is not None, BLOCK=256, num_warps=2,
    )  # fmt: skip
    return table, own, slots, positions


def _variant(name: str, everyday: tuple[str, ...], **special: object) -> Variant:
    integers = "page_table", "lengths", "rows", "offsets", "depth", "batch_page_table", "batch_lengths"
    pointers = dict.fromkeys((f"{name}_ptr" for name in integers), "*i32")
    sizes = dict.fromkeys(("num_requests", "num_nodes", "num_rows", "max_pages"), "i32")
    return Variant(
        f"kv_slots/{name}",
        "kv_slots.triton_kernel:assign_slots",
        {**pointers, "slots_ptr": "*i64", "positions_ptr": "*i64", **sizes},
        {"PAGE_SIZE": 16, "ADVANCE": True, "TREE": True, "BLOCK": 256, **special},
        warps=2,
        stages=1,
        everyday=everyday,
    )


VARIANTS = [_variant("page 16", ("sm_90",)), _variant("page 1 chains", (), PAGE_SIZE=1, ADVANCE=False, TREE=False)]
