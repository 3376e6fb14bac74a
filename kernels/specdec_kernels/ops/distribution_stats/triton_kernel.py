"""Triton kernels of distribution_stats: one read of every row, then a launch that joins its blocks and refines rows
with a cut.

That read also tells how many tokens, and what mass, are ranked above a row's pivot, the drafted token. If these say
that it is the last one kept, with room for the roundings of float32 sums, the row has nothing to refine.

Refining finds the cut by bisection on the rank of tokens (`dist_triton.rank`: level, then id), with masses in float64.
Tiles whose largest logit lies below what can be kept are not read again; when few contenders are left they are gathered
in a scratch of a few thousand ranks and decided there. Nothing is sorted and no weight is stored.

A row is passed on as (its logits, its cells of an overlay, how many these are); `how` is (whether these are folded in,
race blocks of a tile while refining, whether rows are ragged), known when compiling.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...triton_shared.distribution import (
    LAST_ID,
    NEGATIVE_INFINITY,
    NOISE_BLOCK,
    id_of_key,
    logit_of_key,
    midpoint,
    order_key,
)
from ...triton_shared.float64_masses import exp_difference
from ...triton_shared.jit import kernel
from ...triton_shared.overlay import load_logits

INFINITY = tl.constexpr(float("inf"))
DOUBT = tl.constexpr(1e-5)
"""Of a total: how near to a filter's limit a float32 sum decides nothing."""


@triton.jit
def pivot_of(own, pivots, known, row, vocab, FOLD: tl.constexpr):
    """(token, level) of a row's pivot; -1 and -inf where it has none."""
    token = tl.load(pivots + row, mask=row < known, other=-1).to(tl.int32)
    token = tl.where((token >= 0) & (token < vocab), token, -1)
    return token, load_logits(own[0], own[1], own[2], token, token >= 0, vocab, FOLD, None)


@kernel("logits", "vocab", "stride")
def scan(
    logits, temperature, pivots, tops, places, sums, over, cells, room, vocab, blocks, stride, known,
    GROUP: tl.constexpr, PIVOTS: tl.constexpr, FOLD: tl.constexpr, UNALIGNED: tl.constexpr,
):  # fmt: skip
    """Of GROUP race blocks: the largest logit and sum exp((l - largest) / T); the lowest id of the largest in a greedy
    row; else, of the tokens ranked above the pivot, how many there are and that sum of them.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    ids = block[:, None] * NOISE_BLOCK + tl.arange(0, NOISE_BLOCK)[None, :]
    t = tl.load(temperature + row)
    end = (tl.program_id(1) + 1) * GROUP * NOISE_BLOCK
    level = load_logits(
        logits + row * stride, cells + row * room, room, ids, ids < vocab, vocab, FOLD, end if UNALIGNED else None
    )
    clean = tl.where(level == level, level, NEGATIVE_INFINITY)
    top = tl.max(clean, 1)
    at = row * blocks + block
    if t == 0:
        place = tl.min(tl.where(clean == top[:, None], ids, 0x7FFFFFFF), 1)
        tl.store(places + at, place, mask=block < blocks)
    inv_t = tl.where(t == 0, 1.0, tl.math.div_rn(1.0, t))  # `/` is not correctly rounded on a GPU
    scaled_top = top * inv_t
    shift = tl.where(scaled_top > NEGATIVE_INFINITY, scaled_top, 0.0)
    part = tl.exp(level * inv_t - shift[:, None])
    tl.store(sums + at, tl.sum(part, 1), mask=block < blocks)
    if PIVOTS:
        mine = (logits + row * stride, cells + row * room, room)
        token, own = pivot_of(mine, pivots, known, row, vocab, FOLD)
        better = (level > own) | ((level == own) & (ids < token))
        tl.store(over + at, tl.sum(tl.where(better, part, 0.0), 1), mask=block < blocks)
        tl.store(places + at, tl.sum(better.to(tl.int32), 1), mask=(block < blocks) & (t != 0))
    tl.store(tops + at, top, mask=block < blocks)


@triton.jit
def tile_of(own, start, vocab, how: tl.constexpr):
    """(levels, ranks, inside) of a tile of a row."""
    ids = start + tl.arange(0, how[1] * NOISE_BLOCK)
    inside = ids < vocab
    end = start + how[1] * NOISE_BLOCK
    level = load_logits(own[0], own[1], own[2], ids, inside, vocab, how[0], end if how[2] else None)
    return level, order_key(level, ids), inside


@triton.jit
def tile_top(tops, start, blocks, how: tl.constexpr):
    """No token of a tile has a higher rank, from what the scan left."""
    block = start // NOISE_BLOCK + tl.arange(0, how[1])
    return order_key(tl.max(tl.load(tops + block, mask=block < blocks, other=NEGATIVE_INFINITY), 0), 0)


@triton.jit
def share_of(level, inv_t, top_scaled):
    """exp(l / T - top / T) in float64 of float32 products, the mass relative to that of the largest logit."""
    return exp_difference(level * inv_t, top_scaled)


@triton.jit
def above(own, tops, vocab, blocks, inv_t, top_scaled, floor, ceiling, by_mass, how: tl.constexpr):
    """Of the tokens ranked over `floor`: their total (masses, or how many), how many are ranked up to `ceiling`, and
    the lowest rank."""
    total = tl.zeros((), tl.float64)
    count = tl.zeros((), tl.int32)
    least = tl.full((), 0x7FFFFFFFFFFFFFFF, tl.int64)
    for start in range(0, vocab, how[1] * NOISE_BLOCK):
        if tile_top(tops, start, blocks, how) > floor:
            level, ranked, inside = tile_of(own, start, vocab, how)
            over = inside & (ranked > floor)
            value = tl.where(by_mass, share_of(level, inv_t, top_scaled), 1.0)
            total += tl.sum(tl.where(over, value, 0.0), 0)
            count += tl.sum((over & (ranked <= ceiling)).to(tl.int32), 0)
            least = tl.minimum(least, tl.min(tl.where(over, ranked, 0x7FFFFFFFFFFFFFFF), 0))
    return total, count, least


@triton.jit
def gather(own, tops, contenders, vocab, blocks, low, high, ROOM: tl.constexpr, how: tl.constexpr):
    """Writes the ranks in [low, high] in id order, as many as there is room for; returns how many there are."""
    count = tl.zeros((), tl.int32)
    for start in range(0, vocab, how[1] * NOISE_BLOCK):
        if tile_top(tops, start, blocks, how) >= low:
            _, ranked, inside = tile_of(own, start, vocab, how)
            taken = (inside & (ranked >= low) & (ranked <= high)).to(tl.int32)
            place = count + tl.cumsum(taken, 0) - 1
            tl.store(contenders + place, ranked, mask=(taken > 0) & (place < ROOM))
            count += tl.sum(taken, 0)
    tl.debug_barrier()
    return count


@triton.jit
def lowest_kept(
    own, tops, contenders, vocab, blocks, inv_t, top_scaled, low, high, target, by_mass, ROOM: tl.constexpr,
    how: tl.constexpr,
):  # fmt: skip
    """The smallest rank with less than `target` (mass, or number) above it, in [low, high]."""
    passed = tl.zeros((), tl.float64)  # total above `high`
    count = gather(own, tops, contenders, vocab, blocks, low, high, ROOM, how)
    if count > ROOM:
        while count > ROOM:
            half = midpoint(low, high)
            total, upper, _ = above(own, tops, vocab, blocks, inv_t, top_scaled, half, high, by_mass, how)
            if total < target:
                high = half
                passed = total
                count = count - upper
            else:
                low = half + 1
                count = upper
        count = gather(own, tops, contenders, vocab, blocks, low, high, ROOM, how)
    places = tl.arange(0, ROOM)
    ranked = tl.load(contenders + places, mask=places < count, other=-0x7FFFFFFFFFFFFFFF)
    value = tl.where(by_mass, share_of(logit_of_key(ranked), inv_t, top_scaled), 1.0)
    value = tl.where(places < count, value, 0.0)
    while low < high:
        half = midpoint(low, high)
        total = passed + tl.sum(tl.where(ranked > half, value, 0.0), 0)
        if total < target:
            high = half
        else:
            low = half + 1
    tl.debug_barrier()  # the scratch may be written again
    return low


@triton.jit
def level_bound(tops, blocks, wanted, top, PLACES: tl.constexpr):
    """A rank that at least `wanted` race blocks reach with their largest logit; the lowest rank if there are fewer."""
    lowest = order_key(tl.full((), NEGATIVE_INFINITY, tl.float32), LAST_ID)
    block = tl.arange(0, PLACES)
    peak = tl.load(tops + block, mask=block < blocks, other=NEGATIVE_INFINITY)
    ranked = tl.where(block < blocks, order_key(peak, block * 0), lowest - 1)
    low = lowest
    high = tl.where(wanted > blocks, lowest, order_key(top, 0))
    while low < high:
        half = (low >> 1) + (high >> 1) + ((low | high) & 1)
        if tl.sum((ranked >= half).to(tl.int32), 0) >= wanted:
            low = half
        else:
            high = half - 1
    return order_key(logit_of_key(low), LAST_ID)


@triton.jit
def last_kept(number, above_it, own, total, top_k, top_p, min_p):
    """Whether a token is surely the last one that the filters keep: so many are ranked above it, which weigh
    `above_it`, and it weighs `own`, all of them `total`, relative to the largest; top_k is 0 where it is off.
    """
    doubt = DOUBT * total
    upto = above_it + own
    limited, nucleus = top_k > 0, top_p < 1
    # the top-k tokens weigh as much as they do down to this one, or up to all there is
    least = tl.where(limited, upto, total)
    kept = (limited == 0) | (number < top_k)
    kept = kept & ((nucleus == 0) | (above_it < top_p * least - doubt)) & (own >= min_p)
    return kept & ((limited & (number == top_k - 1)) | (nucleus & (upto >= top_p * total + doubt)))


@kernel("logits", "contenders", "vocab", "stride")
def join(
    logits, temperature, top_k, top_p, min_p, pivots, tops, places, sums, over, contenders, out_inv_t, out_lse, out_cut,
    out_tie, mass, cells, room, vocab, blocks, stride, known, PLACES: tl.constexpr, ROOM: tl.constexpr,
    MASSES: tl.constexpr, FARTHEST: tl.constexpr, PIVOTS: tl.constexpr, FOLD: tl.constexpr, UNALIGNED: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """Joins the blocks of a row; where a filter cuts, finds the cut. One program per row; PLACES >= blocks."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, PLACES)
    have = block < blocks
    tops += row * blocks
    peak = tl.load(tops + block, mask=have, other=NEGATIVE_INFINITY)
    sum_of = tl.load(sums + row * blocks + block, mask=have, other=0.0)
    t = tl.load(temperature + row)
    greedy = t == 0
    inv_t = tl.where(greedy, 0.0, tl.math.div_rn(1.0, t))
    top = tl.max(peak, 0)
    unit_t = tl.where(greedy, 1.0, inv_t)
    top_scaled = top * unit_t
    scale = tl.where(peak > NEGATIVE_INFINITY, exp_difference(peak * unit_t, top_scaled), 1.0)
    part = sum_of.to(tl.float64) * scale
    total = tl.sum(part, 0)
    lse = (top_scaled.to(tl.float64) + tl.log(total)).to(tl.float32)
    finite = (tl.abs(lse) < INFINITY) & (tl.abs(top) < INFINITY)  # false for NaN
    cut = tl.full((), NEGATIVE_INFINITY, tl.float32)
    tie = vocab - 1
    k = tl.load(top_k + row)
    p = tl.load(top_p + row).to(tl.float64)
    m = tl.load(min_p + row).to(tl.float64)
    k = tl.where(k < vocab, k, 0)
    filtered = (k > 0) | (p < 1) | (m > 0)
    if MASSES:  # before anything is refined: no filter cuts where masses are known
        weighed = finite & (t != 0) & (filtered == 0) & (tl.abs(lse) < FARTHEST)
        share = part * exp_difference(top_scaled, lse)  # in units of the rounded normaliser, as weights are
        tl.store(mass + row * blocks + block, tl.where(weighed, share.to(tl.float32), float("nan")), mask=have)
    if greedy:
        lse = tl.zeros((), tl.float32)
        if finite:
            first = tl.load(places + row * blocks + block, mask=have & (peak == top), other=0x7FFFFFFF)
            cut = top
            tie = tl.min(first, 0)
    elif filtered & finite:
        mine = (logits + row * stride, cells + row * room, room)
        how: tl.constexpr = (FOLD, BLOCKS, UNALIGNED)
        settled = top != top
        if PIVOTS:
            token, level = pivot_of(mine, pivots, known, row, vocab, FOLD)
            above_it = tl.sum(tl.load(over + row * blocks + block, mask=have, other=0.0).to(tl.float64) * scale, 0)
            number = tl.sum(tl.load(places + row * blocks + block, mask=have, other=0), 0)
            own = share_of(level, inv_t, top_scaled)
            settled = (level > NEGATIVE_INFINITY) & last_kept(number, above_it, own, total, k, p, m)
            if settled:
                lse = (top_scaled.to(tl.float64) + tl.log(above_it + own)).to(tl.float32)
                cut = level
                tie = token
        if settled == 0:
            contenders += row * ROOM
            highest = order_key(top, 0)
            low = order_key(tl.full((), NEGATIVE_INFINITY, tl.float32), LAST_ID)
            for stage in range(2):
                by_mass = stage == 1
                wanted = ((stage == 0) & (k > 0)) | (by_mass & (p < 1))
                if wanted:
                    target = k.to(tl.float64)
                    if by_mass:
                        whole, _, _ = above(mine, tops, vocab, blocks, inv_t, top_scaled, low - 1, highest, True, how)
                        target = p * whole
                        # tokens of relative mass x weigh at most vocab * x together: all that is kept lies above this
                        depth = tl.log(0.5 * (1 - p) * whole / vocab)
                        shy = (depth * 1.0001 - 1e-3) / inv_t - 1e-6 * tl.abs(top).to(tl.float64)
                        deepest = (top.to(tl.float64) + shy).to(tl.float32)
                        low = tl.maximum(low, order_key(deepest, LAST_ID))
                    else:
                        low = level_bound(tops, blocks, k, top, PLACES)
                    low = tl.minimum(low, highest)
                    low = lowest_kept(
                        mine, tops, contenders, vocab, blocks, inv_t, top_scaled, low, highest, target, by_mass, ROOM,
                        how,
                    )  # fmt: skip
            if m > 0:
                floor = low
                ceiling = highest
                while floor < ceiling:  # the smallest rank whose level weighs enough
                    half = midpoint(floor, ceiling)
                    if share_of(logit_of_key(half), inv_t, top_scaled) >= m:
                        ceiling = half
                    else:
                        floor = half + 1
                low = floor
            kept, _, least = above(mine, tops, vocab, blocks, inv_t, top_scaled, low - 1, highest, True, how)
            lse = (top_scaled.to(tl.float64) + tl.log(kept)).to(tl.float32)
            cut = logit_of_key(least)
            tie = tl.where(cut > NEGATIVE_INFINITY, id_of_key(least), vocab - 1)
    tl.store(out_inv_t + row, inv_t)
    tl.store(out_lse + row, tl.where(finite, lse, float("nan")))
    tl.store(out_cut + row, tl.where(finite, cut, float("nan")))
    tl.store(out_tie + row, tl.where(finite, tie, 0))
