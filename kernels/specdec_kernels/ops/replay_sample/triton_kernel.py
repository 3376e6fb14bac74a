"""Triton kernels of replay_sample: the best token of each piece of a row, then the best piece."""

from __future__ import annotations

import triton.language as tl

from ...triton_shared.distribution import NEGATIVE_INFINITY, id_of_key, order_key
from ...triton_shared.jit import kernel
from ...triton_shared.overlay import load_logits
from ...triton_shared.random import REPLAY, gumbel_span


@kernel("logits", "vocab", "stride")
def pieces(
    logits, inv_t, cut, tie_id, seeds, positions, noise, best, cells, room, vocab, stride, noise_stride,
    TILE: tl.constexpr, TILES: tl.constexpr, EXPLICIT: tl.constexpr, FOLD: tl.constexpr,
    UNALIGNED: tl.constexpr,
):  # fmt: skip
    """The rank of the best score of TILES tiles. Noise is made only for tiles that hold a token with weight."""
    row = tl.program_id(0).to(tl.int64)
    scale, least, tie = tl.load(inv_t + row), tl.load(cut + row), tl.load(tie_id + row)
    seed, position = tl.load(seeds + row), tl.load(positions + row)
    found = order_key(tl.full((), NEGATIVE_INFINITY, tl.float32), tl.zeros((), tl.int32))
    if scale != 0:
        for tile in range(TILES):
            first = (tl.program_id(1) * TILES + tile) * TILE
            ids = first + tl.arange(0, TILE)
            level = load_logits(
                logits + row * stride, cells + row * room, room, ids, ids < vocab, vocab, FOLD,
                first + TILE if UNALIGNED else None,
            )  # fmt: skip
            kept = (ids < vocab) & ((level > least) | ((level == least) & (ids <= tie)))
            if tl.max(kept.to(tl.int32), 0) > 0:
                if EXPLICIT:
                    added = tl.load(noise + row * noise_stride + ids, mask=ids < vocab, other=0.0)
                else:
                    added = gumbel_span(seed, position, 0, REPLAY, first, TILE)
                score = tl.where(kept, level * scale + added, NEGATIVE_INFINITY)
                found = tl.maximum(found, tl.max(order_key(score, ids), 0))
    tl.store(best + row * tl.num_programs(1) + tl.program_id(1), found)


@kernel()
def choose(inv_t, tie_id, best, tokens, count, PIECES: tl.constexpr):
    """The best piece of each row; the answer of greedy rows is known."""
    row = tl.program_id(0).to(tl.int64)
    piece = tl.arange(0, PIECES)
    ranked = tl.load(best + row * count + piece, mask=piece < count, other=-0x7FFFFFFFFFFFFFFF)
    token = tl.where(tl.load(inv_t + row) == 0, tl.load(tie_id + row), id_of_key(tl.max(ranked, 0)))
    tl.store(tokens + row, token.to(tl.int64))
