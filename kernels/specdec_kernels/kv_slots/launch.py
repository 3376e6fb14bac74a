"""Launch of the Triton kv_slots."""

from __future__ import annotations

import torch
from torch import Tensor

from ..machine_code import Variant


def kv_slots(
    page_table: Tensor,
    lengths: Tensor,
    rows: Tensor,
    offsets: Tensor,
    depth: Tensor | None,
    nodes: int,
    page_size: int,
    advance: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The operator in one launch. Data is not checked: what has no room goes to the trash."""
    from .triton_kernel import place

    batch, columns = rows.shape[0], page_table.shape[1]
    given = {"page_table": page_table, "lengths": lengths, "rows": rows, "offsets": offsets, "depth": depth}
    for name, each in given.items():
        if each is not None and (each.dtype != torch.int32 or not each.is_contiguous()):
            raise ValueError(f"kv_slots: {name} is {each.dtype} {list(each.shape)}; expected contiguous int32")
    if offsets.shape[0] != batch + 1 or (depth is not None and depth.shape[0] != nodes) or nodes < 0 or page_size < 1:
        raise ValueError(
            f"kv_slots: rows {list(rows.shape)}, offsets {list(offsets.shape)} and depth do not fit {nodes} nodes of "
            f"page size {page_size}; expected [B], [B + 1], [nodes] or None, and a page size of at least 1"
        )
    table, own = page_table.new_empty(batch, columns), lengths.new_empty(batch)
    slots, positions = (torch.empty(nodes, dtype=torch.int64, device=rows.device) for _ in range(2))
    place[(batch + 1,)](
        page_table, lengths, rows, offsets, depth, table, own, slots, positions,
        batch, nodes, page_table.shape[0], columns,
        PAGE=page_size, ADVANCE=advance, TREE=depth is not None, BLOCK=256, num_warps=2,
    )  # fmt: skip
    return table, own, slots, positions


VARIANTS = [
    Variant(
        "kv_slots/page 16",
        "kv_slots.triton_kernel:place",
        {
            **dict.fromkeys(("page_table", "lengths", "rows", "offsets", "depth", "own_table", "own_lengths"), "*i32"),
            "slots": "*i64",
            "positions": "*i64",
            **dict.fromkeys(("batch", "nodes", "capacity", "columns"), "i32"),
        },
        {"PAGE": 16, "ADVANCE": True, "TREE": True, "BLOCK": 256},
        warps=2,
        stages=1,
    )
]
