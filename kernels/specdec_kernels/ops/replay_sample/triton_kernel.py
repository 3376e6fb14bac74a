"""Triton kernels of replay_sample: the best token of each piece of a row, then the best piece.

Shapes: R rows, V = vocab_size, P = num_pieces pieces of TILE * TILES logits.
    logits_ptr [R, V], row stride logits_stride; inv_t_ptr, cut_ptr float32 [R]; tie_id_ptr int32 [R]
    seeds_ptr int64 [R], positions_ptr int32 [R]; noise_ptr float32 [R, V] (read if EXPLICIT_NOISE)
    overlay_ptr int32 [R, overlay_stride]
    best_ptr int64 [R, P], order keys; tokens_ptr int64 [R]
"""

from __future__ import annotations

import triton.language as tl

from ...triton_shared.distribution import NEGATIVE_INFINITY, id_of_key, order_key
from ...triton_shared.jit import kernel
from ...triton_shared.overlay import load_logits
from ...triton_shared.random import REPLAY, gumbel_span


@kernel("logits_ptr", "vocab_size", "logits_stride")
def score_pieces(
    logits_ptr, inv_t_ptr, cut_ptr, tie_id_ptr, seeds_ptr, positions_ptr, noise_ptr, best_ptr, overlay_ptr,
    overlay_stride, vocab_size, logits_stride, noise_stride, TILE: tl.constexpr, TILES: tl.constexpr,
    EXPLICIT_NOISE: tl.constexpr, HAS_OVERLAY: tl.constexpr, UNALIGNED: tl.constexpr,
):  # fmt: skip
    """Grid (R, P): order key of the best score of TILES tiles. Tiles without a token of weight need no noise."""
    row = tl.program_id(0).to(tl.int64)
    inv_t, cut, tie_id = tl.load(inv_t_ptr + row), tl.load(cut_ptr + row), tl.load(tie_id_ptr + row)
    seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row)
    best = order_key(tl.full((), NEGATIVE_INFINITY, tl.float32), tl.zeros((), tl.int32))
    if inv_t != 0:
        for tile in range(TILES):
            first = (tl.program_id(1) * TILES + tile) * TILE
            ids = first + tl.arange(0, TILE)
            level = load_logits(
                logits_ptr + row * logits_stride, overlay_ptr + row * overlay_stride, overlay_stride, ids,
                ids < vocab_size, vocab_size, HAS_OVERLAY, first + TILE if UNALIGNED else None,
            )  # fmt: skip
            kept = (ids < vocab_size) & ((level > cut) | ((level == cut) & (ids <= tie_id)))
            if tl.max(kept.to(tl.int32), 0) > 0:
                if EXPLICIT_NOISE:
                    noise = tl.load(noise_ptr + row * noise_stride + ids, mask=ids < vocab_size, other=0.0)
                else:
                    noise = gumbel_span(seed, position, 0, REPLAY, first, TILE)
                score = tl.where(kept, level * inv_t + noise, NEGATIVE_INFINITY)
                best = tl.maximum(best, tl.max(order_key(score, ids), 0))
    tl.store(best_ptr + row * tl.num_programs(1) + tl.program_id(1), best)


@kernel()
def select_tokens(inv_t_ptr, tie_id_ptr, best_ptr, tokens_ptr, num_pieces, PIECES: tl.constexpr):
    """Grid (R): the token of the best piece; tie_id for greedy rows. PIECES: at least P."""
    row = tl.program_id(0).to(tl.int64)
    piece = tl.arange(0, PIECES)
    keys = tl.load(best_ptr + row * num_pieces + piece, mask=piece < num_pieces, other=-0x7FFFFFFFFFFFFFFF)
    token = tl.where(tl.load(inv_t_ptr + row) == 0, tl.load(tie_id_ptr + row), id_of_key(tl.max(keys, 0)))
    tl.store(tokens_ptr + row, token.to(tl.int64))
