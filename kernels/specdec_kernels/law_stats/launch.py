"""Triton backend of law_stats: launch configurations and the call."""

from __future__ import annotations

import torch
from torch import Tensor

from ..machine_code import Variant
from ..random import BLOCK
from .reference import FARTHEST, check
from .triton_kernel import join, scan

GROUP = 8
"""Race blocks that one program scans: 8,192 logits, 32 per thread."""
ROOM = 2048
"""Contenders of a row that are decided in registers."""
WARPS = 8


def law_stats(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, *, masses: bool = False
) -> tuple[Tensor, ...]:
    check(logits, temperature, top_k, top_p, min_p)
    rows, vocab = logits.shape
    blocks = -(-vocab // BLOCK)
    inv_t, lse, cut, top, total = (
        torch.empty(shape, dtype=torch.float32, device=logits.device) for shape in [(rows,)] * 3 + [(rows, blocks)] * 2
    )
    tie_id, place = (torch.empty(s, dtype=torch.int32, device=logits.device) for s in ((rows,), (rows, blocks)))
    mass = torch.empty(rows if masses else 0, blocks, dtype=torch.float32, device=logits.device)
    if rows:
        filters = [part.contiguous() for part in (temperature, top_k, top_p, min_p)]
        contenders = torch.empty(rows, ROOM, dtype=torch.int64, device=logits.device)
        scan[(rows, -(-blocks // GROUP))](
            logits, filters[0], top, place, total, vocab, blocks, logits.stride(0), GROUP,
            num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
        join[(rows,)](
            logits, *filters, top, place, total, contenders, inv_t, lse, cut, tie_id, mass, vocab, blocks,
            logits.stride(0), 1 << (blocks - 1).bit_length(), ROOM, masses, FARTHEST,
            num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return (inv_t, lse, cut, tie_id, mass) if masses else (inv_t, lse, cut, tie_id)


def _variant(kernel: str, dtype: str, everyday: tuple[str, ...], blocks: int = 256, **constants: object) -> Variant:
    logits = {"logits": f"*{dtype}", "temperature": "*fp32", "vocab": "i32:16", "blocks": "i32", "stride": "i32:16"}
    tables = {"tops": "*fp32", "places": "*i32", "sums": "*fp32"}
    if kernel == "scan":
        return Variant(
            f"law_stats/scan {dtype}", "law_stats.triton_kernel:scan", logits | tables, {"GROUP": GROUP}, WARPS,
            everyday=everyday, fusion=False,
        )  # fmt: skip
    answers = {"out_inv_t": "*fp32", "out_lse": "*fp32", "out_cut": "*fp32", "out_tie": "*i32", "mass": "*fp32"}
    filters = {"top_k": "*i32", "top_p": "*fp32", "min_p": "*fp32", "contenders": "*i64"}
    return Variant(
        f"law_stats/join {dtype} {blocks} blocks", "law_stats.triton_kernel:join", logits | tables | filters | answers,
        {"PLACES": blocks, "ROOM": ROOM, "MASSES": True, "FARTHEST": FARTHEST}, WARPS, everyday=everyday, fusion=False,
    )  # fmt: skip


VARIANTS = [
    *(_variant("scan", dtype, ("sm_90",) if dtype == "bf16" else ()) for dtype in ("bf16", "fp16", "fp32")),
    *(_variant("join", dtype, ("sm_90",) if dtype == "bf16" else ()) for dtype in ("bf16", "fp32")),
    _variant("join", "bf16", (), blocks=32),
]
