"""Triton kernels of distribution_stats: one read of every row, then a launch that joins its blocks and refines rows
with a cut.

The read also finds how many tokens, and what mass, are ordered before a row's pivot, the drafted token. If these show
that the pivot is the last token kept, with a margin for the rounding of float32 sums, the row needs no refinement.

Refinement finds the cut by bisection on the order of tokens (`distribution.order_key`: logit, then id), with masses in
float64. Tiles whose largest logit cannot be kept are not read again. Once few contenders are left, their keys are
gathered in scratch and decided there. Nothing is sorted, and no weight is stored.

Shapes: R rows, V = vocab_size, K = num_blocks = ceil(V / 1024) noise blocks.
    logits_ptr [R, V], row stride logits_stride; overlay_ptr int32 [R, overlay_stride]
    temperature_ptr, top_p_ptr, min_p_ptr float32 [R]; top_k_ptr int32 [R]; pivots_ptr int64 [num_pivots]
    block_top_ptr float32 [R, K], largest logit of a block
    block_sum_ptr float32 [R, K], sum of exp((l - largest) / T) of a block
    block_place_ptr int32 [R, K], greedy rows: lowest id of the largest logit; others: tokens before the pivot
    block_above_ptr float32 [R, K], the part of block_sum of tokens before the pivot
    contenders_ptr int64 [R, CONTENDERS], order keys
    inv_t_ptr, lse_ptr, cut_ptr float32 [R], tie_id_ptr int32 [R], mass_ptr float32 [R, K]: results
"""

from __future__ import annotations

from typing import Any, NamedTuple

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
MARGIN = tl.constexpr(1e-5)
"""Part of a total: so near to a filter's limit, a float32 sum decides nothing."""


class Row(NamedTuple):
    """One row of logits. Kernels take flat arguments and make it, see `triton_shared.residual`."""

    logits_ptr: Any
    overlay_ptr: Any
    overlay_stride: Any
    vocab_size: Any


class RefinedRow(NamedTuple):
    """A row whose cut is searched for."""

    logits: Row
    block_top_ptr: Any  # float32 [K], of this row
    num_blocks: Any
    inv_t: Any
    scaled_top: Any  # largest logit times inv_t


class RowFlags(NamedTuple):
    """Numbers that are known when a kernel is compiled. Kernels declare it as tl.constexpr."""

    has_overlay: Any
    unaligned: Any  # see `jit.unaligned_vocab`
    tile_blocks: Any  # noise blocks of a tile during refinement


@triton.jit
def load_row(row, flags: tl.constexpr, ids, inside, tile_end):
    """Logits of tokens `ids` of a row, float32; -inf where not `inside`."""
    return load_logits(
        row.logits_ptr, row.overlay_ptr, row.overlay_stride, ids, inside, row.vocab_size, flags.has_overlay,
        tile_end if flags.unaligned else None,
    )  # fmt: skip


@triton.jit
def load_pivot(row, flags: tl.constexpr, pivots_ptr, num_pivots, index):
    """Returns token and logit of a row's pivot; -1 and -inf if it has none."""
    token = tl.load(pivots_ptr + index, mask=index < num_pivots, other=-1).to(tl.int32)
    token = tl.where((token >= 0) & (token < row.vocab_size), token, -1)
    return token, load_row(row, flags, token, token >= 0, None)


@kernel("logits_ptr", "vocab_size", "logits_stride")
def scan_blocks(
    logits_ptr, temperature_ptr, pivots_ptr, block_top_ptr, block_place_ptr, block_sum_ptr, block_above_ptr,
    overlay_ptr, overlay_stride, vocab_size, num_blocks, logits_stride, num_pivots, GROUP: tl.constexpr,
    HAS_PIVOTS: tl.constexpr, HAS_OVERLAY: tl.constexpr, UNALIGNED: tl.constexpr,
):  # fmt: skip
    """Grid (R, ceil(K / GROUP)): largest logit, sum, place and mass before the pivot of GROUP noise blocks."""
    index = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    ids = block[:, None] * NOISE_BLOCK + tl.arange(0, NOISE_BLOCK)[None, :]
    temperature = tl.load(temperature_ptr + index)
    tile_end = (tl.program_id(1) + 1) * GROUP * NOISE_BLOCK
    row_ptr, row_overlay_ptr = logits_ptr + index * logits_stride, overlay_ptr + index * overlay_stride
    row = Row(row_ptr, row_overlay_ptr, overlay_stride, vocab_size)
    flags: tl.constexpr = RowFlags(HAS_OVERLAY, UNALIGNED, GROUP)
    level = load_row(row, flags, ids, ids < vocab_size, tile_end)
    clean = tl.where(level == level, level, NEGATIVE_INFINITY)
    top = tl.max(clean, 1)
    at = index * num_blocks + block
    if temperature == 0:
        place = tl.min(tl.where(clean == top[:, None], ids, 0x7FFFFFFF), 1)
        tl.store(block_place_ptr + at, place, mask=block < num_blocks)
    # `/` is not correctly rounded on a GPU
    inv_t = tl.where(temperature == 0, 1.0, tl.math.div_rn(1.0, temperature))
    scaled_top = top * inv_t
    shift = tl.where(scaled_top > NEGATIVE_INFINITY, scaled_top, 0.0)
    part = tl.exp(level * inv_t - shift[:, None])
    tl.store(block_sum_ptr + at, tl.sum(part, 1), mask=block < num_blocks)
    if HAS_PIVOTS:
        pivot, pivot_level = load_pivot(row, flags, pivots_ptr, num_pivots, index)
        before = (level > pivot_level) | ((level == pivot_level) & (ids < pivot))
        tl.store(block_above_ptr + at, tl.sum(tl.where(before, part, 0.0), 1), mask=block < num_blocks)
        counts = tl.sum(before.to(tl.int32), 1)
        tl.store(block_place_ptr + at, counts, mask=(block < num_blocks) & (temperature != 0))
    tl.store(block_top_ptr + at, top, mask=block < num_blocks)


@triton.jit
def load_key_tile(row, flags: tl.constexpr, start):
    """Returns logits, order keys and mask of a tile of a row."""
    ids = start + tl.arange(0, flags.tile_blocks * NOISE_BLOCK)
    inside = ids < row.logits.vocab_size
    tile_end = start + flags.tile_blocks * NOISE_BLOCK
    level = load_row(row.logits, flags, ids, inside, tile_end)
    return level, order_key(level, ids), inside


@triton.jit
def tile_bound(row, flags: tl.constexpr, start):
    """An order key that no token of a tile exceeds, from the blocks' largest logits."""
    block = start // NOISE_BLOCK + tl.arange(0, flags.tile_blocks)
    tops = tl.load(row.block_top_ptr + block, mask=block < row.num_blocks, other=NEGATIVE_INFINITY)
    return order_key(tl.max(tops, 0), 0)


@triton.jit
def relative_mass(level, inv_t, scaled_top):
    """exp(l / T - top / T) in float64 of float32 products: the mass relative to that of the largest logit."""
    return exp_difference(level * inv_t, scaled_top)


@triton.jit
def sum_above(row, flags: tl.constexpr, floor, ceiling, by_mass):
    """Sums over the tokens whose keys exceed `floor`.

    Returns:
        Their total mass (`by_mass`) or number, the number of keys up to `ceiling`, and the lowest key.
    """
    total = tl.zeros((), tl.float64)
    count = tl.zeros((), tl.int32)
    least = tl.full((), 0x7FFFFFFFFFFFFFFF, tl.int64)
    for start in range(0, row.logits.vocab_size, flags.tile_blocks * NOISE_BLOCK):
        if tile_bound(row, flags, start) > floor:
            level, key, inside = load_key_tile(row, flags, start)
            above = inside & (key > floor)
            value = tl.where(by_mass, relative_mass(level, row.inv_t, row.scaled_top), 1.0)
            total += tl.sum(tl.where(above, value, 0.0), 0)
            count += tl.sum((above & (key <= ceiling)).to(tl.int32), 0)
            least = tl.minimum(least, tl.min(tl.where(above, key, 0x7FFFFFFFFFFFFFFF), 0))
    return total, count, least


@triton.jit
def gather_contenders(row, flags: tl.constexpr, contenders_ptr, low, high, CONTENDERS: tl.constexpr):
    """Writes the keys in [low, high] in id order, up to CONTENDERS of them; returns how many there are."""
    count = tl.zeros((), tl.int32)
    for start in range(0, row.logits.vocab_size, flags.tile_blocks * NOISE_BLOCK):
        if tile_bound(row, flags, start) >= low:
            _, key, inside = load_key_tile(row, flags, start)
            taken = (inside & (key >= low) & (key <= high)).to(tl.int32)
            place = count + tl.cumsum(taken, 0) - 1
            tl.store(contenders_ptr + place, key, mask=(taken > 0) & (place < CONTENDERS))
            count += tl.sum(taken, 0)
    tl.debug_barrier()
    return count


@triton.jit
def lowest_kept_key(row, flags: tl.constexpr, contenders_ptr, low, high, target, by_mass, CONTENDERS: tl.constexpr):
    """Returns the smallest key in [low, high] with less than `target` (mass, or number) above it."""
    above_high = tl.zeros((), tl.float64)
    count = gather_contenders(row, flags, contenders_ptr, low, high, CONTENDERS)
    if count > CONTENDERS:
        while count > CONTENDERS:
            half = midpoint(low, high)
            total, upper, _ = sum_above(row, flags, half, high, by_mass)
            if total < target:
                high = half
                above_high = total
                count = count - upper
            else:
                low = half + 1
                count = upper
        count = gather_contenders(row, flags, contenders_ptr, low, high, CONTENDERS)
    place = tl.arange(0, CONTENDERS)
    key = tl.load(contenders_ptr + place, mask=place < count, other=-0x7FFFFFFFFFFFFFFF)
    value = tl.where(by_mass, relative_mass(logit_of_key(key), row.inv_t, row.scaled_top), 1.0)
    value = tl.where(place < count, value, 0.0)
    while low < high:
        half = midpoint(low, high)
        total = above_high + tl.sum(tl.where(key > half, value, 0.0), 0)
        if total < target:
            high = half
        else:
            low = half + 1
    tl.debug_barrier()  # the scratch may be written again
    return low


@triton.jit
def top_k_bound(row, wanted, top, PLACES: tl.constexpr):
    """Returns a key that the largest logits of `wanted` noise blocks reach; the lowest key if there are fewer."""
    lowest = order_key(tl.full((), NEGATIVE_INFINITY, tl.float32), LAST_ID)
    block = tl.arange(0, PLACES)
    block_top = tl.load(row.block_top_ptr + block, mask=block < row.num_blocks, other=NEGATIVE_INFINITY)
    key = tl.where(block < row.num_blocks, order_key(block_top, block * 0), lowest - 1)
    low = lowest
    high = tl.where(wanted > row.num_blocks, lowest, order_key(top, 0))
    while low < high:
        half = (low >> 1) + (high >> 1) + ((low | high) & 1)
        if tl.sum((key >= half).to(tl.int32), 0) >= wanted:
            low = half
        else:
            high = half - 1
    return order_key(logit_of_key(low), LAST_ID)


@triton.jit
def is_last_kept(number, mass_before, own_mass, total, top_k, top_p, min_p):
    """Decides whether a token is certainly the last one that the filters keep.

    number, mass_before: number and mass of the tokens ordered before it. Masses are relative to that of the largest
    logit. top_k is 0 if off.

    Returns:
        True if no rounding error can change the decision.
    """
    margin = MARGIN * total
    mass_upto = mass_before + own_mass
    limited, nucleus = top_k > 0, top_p < 1
    # the mass of the top-k tokens is at least the mass down to this one, or all there is
    least = tl.where(limited, mass_upto, total)
    kept = (limited == 0) | (number < top_k)
    kept = kept & ((nucleus == 0) | (mass_before < top_p * least - margin)) & (own_mass >= min_p)
    return kept & ((limited & (number == top_k - 1)) | (nucleus & (mass_upto >= top_p * total + margin)))


@kernel("logits_ptr", "contenders_ptr", "vocab_size", "logits_stride")
def join_blocks(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, pivots_ptr, block_top_ptr, block_place_ptr,
    block_sum_ptr, block_above_ptr, contenders_ptr, inv_t_ptr, lse_ptr, cut_ptr, tie_id_ptr, mass_ptr, overlay_ptr,
    overlay_stride, vocab_size, num_blocks, logits_stride, num_pivots, PLACES: tl.constexpr, CONTENDERS: tl.constexpr,
    HAS_MASSES: tl.constexpr, FARTHEST: tl.constexpr, HAS_PIVOTS: tl.constexpr, HAS_OVERLAY: tl.constexpr,
    UNALIGNED: tl.constexpr, TILE_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Grid (R): joins the blocks of a row, and finds the cut if a filter applies. PLACES: at least K."""
    index = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, PLACES)
    exists = block < num_blocks
    block_top_ptr += index * num_blocks
    block_top = tl.load(block_top_ptr + block, mask=exists, other=NEGATIVE_INFINITY)
    block_sum = tl.load(block_sum_ptr + index * num_blocks + block, mask=exists, other=0.0)
    temperature = tl.load(temperature_ptr + index)
    greedy = temperature == 0
    inv_t = tl.where(greedy, 0.0, tl.math.div_rn(1.0, temperature))
    top = tl.max(block_top, 0)
    scale = tl.where(greedy, 1.0, inv_t)
    scaled_top = top * scale
    block_scale = tl.where(block_top > NEGATIVE_INFINITY, exp_difference(block_top * scale, scaled_top), 1.0)
    part = block_sum.to(tl.float64) * block_scale
    total = tl.sum(part, 0)
    lse = (scaled_top.to(tl.float64) + tl.log(total)).to(tl.float32)
    finite = (tl.abs(lse) < INFINITY) & (tl.abs(top) < INFINITY)  # false for NaN
    cut = tl.full((), NEGATIVE_INFINITY, tl.float32)
    tie_id = vocab_size - 1
    top_k = tl.load(top_k_ptr + index)
    top_p = tl.load(top_p_ptr + index).to(tl.float64)
    min_p = tl.load(min_p_ptr + index).to(tl.float64)
    top_k = tl.where(top_k < vocab_size, top_k, 0)
    filtered = (top_k > 0) | (top_p < 1) | (min_p > 0)
    if HAS_MASSES:  # before refinement: masses are known only where no filter cuts
        known = finite & (temperature != 0) & (filtered == 0) & (tl.abs(lse) < FARTHEST)
        mass = part * exp_difference(scaled_top, lse)  # in units of the rounded normaliser, like weights
        tl.store(mass_ptr + index * num_blocks + block, tl.where(known, mass.to(tl.float32), float("nan")), mask=exists)
    if greedy:
        lse = tl.zeros((), tl.float32)
        if finite:
            largest = exists & (block_top == top)
            first = tl.load(block_place_ptr + index * num_blocks + block, mask=largest, other=0x7FFFFFFF)
            cut = top
            tie_id = tl.min(first, 0)
    elif filtered & finite:
        row_ptr, row_overlay_ptr = logits_ptr + index * logits_stride, overlay_ptr + index * overlay_stride
        logits = Row(row_ptr, row_overlay_ptr, overlay_stride, vocab_size)
        row = RefinedRow(logits, block_top_ptr, num_blocks, inv_t, scaled_top)
        flags: tl.constexpr = RowFlags(HAS_OVERLAY, UNALIGNED, TILE_BLOCKS)
        settled = top != top
        if HAS_PIVOTS:
            pivot, level = load_pivot(logits, flags, pivots_ptr, num_pivots, index)
            block_above = tl.load(block_above_ptr + index * num_blocks + block, mask=exists, other=0.0)
            mass_before = tl.sum(block_above.to(tl.float64) * block_scale, 0)
            number = tl.sum(tl.load(block_place_ptr + index * num_blocks + block, mask=exists, other=0), 0)
            own_mass = relative_mass(level, inv_t, scaled_top)
            settled = is_last_kept(number, mass_before, own_mass, total, top_k, top_p, min_p)
            settled = (level > NEGATIVE_INFINITY) & settled
            if settled:
                lse = (scaled_top.to(tl.float64) + tl.log(mass_before + own_mass)).to(tl.float32)
                cut = level
                tie_id = pivot
        if settled == 0:
            contenders_ptr += index * CONTENDERS
            highest = order_key(top, 0)
            low = order_key(tl.full((), NEGATIVE_INFINITY, tl.float32), LAST_ID)
            for stage in range(2):
                by_mass = stage == 1
                wanted = ((stage == 0) & (top_k > 0)) | (by_mass & (top_p < 1))
                if wanted:
                    target = top_k.to(tl.float64)
                    if by_mass:
                        whole, _, _ = sum_above(row, flags, low - 1, highest, True)
                        target = top_p * whole
                        # tokens of relative mass x weigh at most V * x together: all kept tokens are above this one
                        depth = tl.log(0.5 * (1 - top_p) * whole / vocab_size)
                        distance = (depth * 1.0001 - 1e-3) / inv_t - 1e-6 * tl.abs(top).to(tl.float64)
                        deepest = (top.to(tl.float64) + distance).to(tl.float32)
                        low = tl.maximum(low, order_key(deepest, LAST_ID))
                    else:
                        low = top_k_bound(row, top_k, top, PLACES)
                    low = tl.minimum(low, highest)
                    low = lowest_kept_key(row, flags, contenders_ptr, low, highest, target, by_mass, CONTENDERS)
            if min_p > 0:
                floor = low
                ceiling = highest
                while floor < ceiling:  # the smallest key whose logit has enough mass
                    half = midpoint(floor, ceiling)
                    if relative_mass(logit_of_key(half), inv_t, scaled_top) >= min_p:
                        ceiling = half
                    else:
                        floor = half + 1
                low = floor
            kept, _, least = sum_above(row, flags, low - 1, highest, True)
            lse = (scaled_top.to(tl.float64) + tl.log(kept)).to(tl.float32)
            cut = logit_of_key(least)
            tie_id = tl.where(cut > NEGATIVE_INFINITY, id_of_key(least), vocab_size - 1)
    tl.store(inv_t_ptr + index, inv_t)
    tl.store(lse_ptr + index, tl.where(finite, lse, float("nan")))
    tl.store(cut_ptr + index, tl.where(finite, cut, float("nan")))
    tl.store(tie_id_ptr + index, tl.where(finite, tie_id, 0))
