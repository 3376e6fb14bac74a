"""Triton backend of replay_sample: launch configurations and the call."""

from __future__ import annotations

import torch
from torch import Tensor

from ...dispatch.workspace import TensorSpec, carve_workspace, declare_scratch, result_tensors
from ...overlay import Overlay, launch_arguments
from ...triton_shared.aot_config import Variant, size_type
from ...triton_shared.jit import unaligned_vocab
from .reference import check
from .triton_kernel import score_pieces, select_tokens

TILE = 2048
TILES = 2
"""Tiles of one program: noise costs about a hundred instructions per token, so pieces are short and many."""
WARPS = 8


def scratch(logits: Tensor, *args: object, **kwargs: object) -> list[TensorSpec]:
    """Per row: the best order key of every piece."""
    rows, vocab_size = logits.shape
    return [((rows, -(-vocab_size // (TILE * TILES))), torch.int64)]


@declare_scratch(scratch)
def replay_sample(
    logits: Tensor,
    inv_t: Tensor,
    cut: Tensor,
    tie_id: Tensor,
    seeds: Tensor,
    positions: Tensor,
    noise: Tensor | None = None,
    *,
    overlay: Overlay | None = None,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
) -> Tensor:
    """Runs the operator in two launches."""
    check(logits, inv_t, cut, tie_id, seeds, positions, noise)
    rows, vocab_size = logits.shape
    (best,), _ = carve_workspace("replay_sample", workspace, scratch(logits), logits.device)
    (tokens,) = result_tensors("replay_sample", out, [((rows,), torch.int64)], logits.device)
    if rows:
        pieces = best.shape[1]
        inv_t, tie_id = inv_t.contiguous(), tie_id.contiguous()
        keys = (inv_t, cut.contiguous(), tie_id, seeds.contiguous(), positions.contiguous())
        given_noise = logits if noise is None else noise.contiguous()
        words, overlay_stride = launch_arguments("replay_sample", overlay, logits, tie_id)
        score_pieces[(rows, pieces)](
            logits, *keys, given_noise, best, words, overlay_stride, vocab_size, logits.stride(0), vocab_size, TILE,
            TILES, noise is not None, overlay_stride > 0, unaligned_vocab(vocab_size, logits.stride(0)),
            num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
        select_tokens[(rows,)](inv_t, tie_id, best, tokens, pieces, 1 << (pieces - 1).bit_length(), num_warps=1)
    return tokens


def _variant(
    dtype: str, everyday: tuple[str, ...], explicit: bool = False, overlay: bool = False, unaligned: bool = False
) -> Variant:
    arguments = {
        "logits_ptr": f"*{dtype}", "inv_t_ptr": "*fp32", "cut_ptr": "*fp32", "tie_id_ptr": "*i32", "seeds_ptr": "*i64",
        "positions_ptr": "*i32", "noise_ptr": "*fp32", "best_ptr": "*i64", "overlay_ptr": "*i32",
        "overlay_stride": "i32:16", "vocab_size": size_type(unaligned), "logits_stride": "i32:16",
        "noise_stride": "i32",
    }  # fmt: skip
    special = (" given noise" if explicit else "") + (" with an overlay" if overlay else "")
    special += " unaligned vocabulary" if unaligned else ""
    constants = {
        "TILE": TILE, "TILES": TILES, "EXPLICIT_NOISE": explicit, "HAS_OVERLAY": overlay, "UNALIGNED": unaligned,
    }  # fmt: skip
    return Variant(
        f"replay_sample/score_pieces {dtype}{special}", "replay_sample.triton_kernel:score_pieces", arguments,
        constants, WARPS, everyday=everyday, fusion=False,
    )  # fmt: skip


VARIANTS = [
    *(_variant(dtype, ("sm_90",) if dtype == "bf16" else ()) for dtype in ("bf16", "fp16", "fp32")),
    _variant("bf16", (), explicit=True),
    _variant("bf16", (), overlay=True),
    *(_variant(dtype, (), unaligned=True) for dtype in ("bf16", "fp32")),
    _variant("bf16", (), overlay=True, unaligned=True),
    Variant(
        "replay_sample/select_tokens", "replay_sample.triton_kernel:select_tokens",
        {"inv_t_ptr": "*fp32", "tie_id_ptr": "*i32", "best_ptr": "*i64", "tokens_ptr": "*i64", "num_pieces": "i32"},
        {"PIECES": 64}, 1,
    ),
]  # fmt: skip
