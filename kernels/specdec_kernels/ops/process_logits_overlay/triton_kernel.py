"""Triton kernel of process_logits_overlay: one program writes a row's words, from its bits to the replaced logits.

Tables, masks and entries that do not exist change nothing; a parent that does not precede its child ends a path. Every
listed token has its bit before anything is counted, so the words of a row hold all replaced logits.

Shapes: as in `process_logits.triton_kernel`, and
    overlay_ptr int32 [R, overlay_stride], see `specdec_kernels.overlay.Overlay`
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...triton_shared.distribution import NEGATIVE_INFINITY
from ...triton_shared.jit import kernel
from ...triton_shared.overlay import PLANES, WORD, count_bits, find_replacement
from ..process_logits.triton_kernel import count_on_path, count_uncommitted, entry_bounds, locate_row, penalise

REPLACED, FORBIDDEN = tl.constexpr(0), tl.constexpr(2)
"""Planes of bits."""


@triton.jit
def bit_of(token):
    """Returns the bit of a token in its word."""
    return (token * 0 + 1).to(tl.int32) << (token % WORD).to(tl.int32)


@triton.jit
def set_bits(overlay_ptr, plane: tl.constexpr, token, wanted):
    """Sets the bits of tokens in a plane."""
    token = tl.where(wanted, token, 0)
    tl.atomic_or(overlay_ptr + (token // WORD) * PLANES + plane, bit_of(token), mask=wanted, sem="relaxed")


@triton.jit
def store_replacements(overlay_ptr, token, level, wanted, vocab_size, overlay_stride):
    """Stores the replaced logits of tokens whose bits are set."""
    where, has_bit = find_replacement(overlay_ptr, token.to(tl.int32), wanted, vocab_size, overlay_stride)
    tl.store(overlay_ptr + where, level.to(tl.int32, bitcast=True), mask=has_bit)


@kernel()
def build_overlay(
    logits_ptr, tokens_ptr, parents_ptr, offsets_ptr, root_positions_ptr, nodes_ptr, factors_ptr, table_rows_ptr,
    table_ids_ptr, table_counts_ptr, table_sizes_ptr, add_offsets_ptr, add_ids_ptr, add_values_ptr, add_until_ptr,
    forced_offsets_ptr, forced_positions_ptr, forced_ids_ptr, mask_words_ptr, mask_index_ptr, overlay_ptr,
    num_requests, num_nodes, num_tables, num_additions, num_forced, num_masks, vocab_size, logits_stride,
    table_capacity, mask_words, overlay_stride, TILE: tl.constexpr, WORDS: tl.constexpr, REQUESTS: tl.constexpr,
    HAS_NODES: tl.constexpr, HAS_PENALTIES: tl.constexpr, HAS_ADDITIONS: tl.constexpr, HAS_FORCED: tl.constexpr,
    HAS_MASKS: tl.constexpr,
):  # fmt: skip
    """Grid (R): the words of one row."""
    request, start, node, position = locate_row(
        nodes_ptr, offsets_ptr, parents_ptr, root_positions_ptr, num_requests, num_nodes, HAS_NODES, REQUESTS
    )
    row = tl.program_id(0).to(tl.int64)
    overlay_ptr += row * overlay_stride
    num_words = tl.cdiv(vocab_size, WORD)
    lane, step = tl.arange(0, TILE), tl.arange(0, WORDS)
    mask = tl.full((), -1, tl.int32)
    if HAS_MASKS:
        mask = tl.load(mask_index_ptr + row)
    # forbidden tokens of forced tokens and masks
    for first in range(0, num_words, WORDS):
        word_at = first + step
        forbidden = tl.zeros((WORDS,), tl.int32)
        if request >= 0:
            if HAS_FORCED:
                begin, end = entry_bounds(forced_offsets_ptr, request, num_forced)
                for entry in range(begin, end):
                    if tl.load(forced_positions_ptr + entry).to(tl.int64) == position:
                        token = tl.load(forced_ids_ptr + entry)
                        own = (token >= 0) & (token // WORD == word_at)
                        forbidden = forbidden | tl.where(own, bit_of(token) ^ -1, -1)
            if HAS_MASKS:  # noqa: SIM102 (known when compiling)
                if (mask >= 0) & (mask < num_masks):
                    own_words_ptr = mask_words_ptr + mask.to(tl.int64) * mask_words
                    allowed = tl.load(own_words_ptr + word_at, mask=word_at < num_words, other=-1)
                    forbidden = forbidden | (allowed ^ -1)
        left = vocab_size - word_at * WORD  # tokens of the word
        inside = tl.where(left < WORD, (step * 0 - 1 << tl.minimum(tl.maximum(left, 0), 31)) ^ -1, -1)
        tl.store(overlay_ptr + word_at * PLANES, step * 0, mask=word_at < num_words)
        tl.store(overlay_ptr + word_at * PLANES + 2, forbidden & inside, mask=word_at < num_words)
    for first in range(num_words * PLANES, overlay_stride, TILE):
        tl.store(overlay_ptr + first + lane, lane * 0, mask=first + lane < overlay_stride)
    tl.debug_barrier()
    # bits of tokens with penalties and additions; their places are walked twice
    penalised = request < -1
    repetition = tl.full((), 1.0, tl.float32)
    presence = tl.zeros((), tl.float32)
    frequency = tl.zeros((), tl.float32)
    num_committed = tl.zeros((), tl.int32)
    own_ids_ptr = table_ids_ptr
    own_counts_ptr = table_counts_ptr
    if request >= 0:
        logits_ptr += row * logits_stride
        tokens_ptr += start
        parents_ptr += start
        if HAS_PENALTIES:
            repetition = tl.load(factors_ptr + 3 * request)
            presence = tl.load(factors_ptr + 3 * request + 1)
            frequency = tl.load(factors_ptr + 3 * request + 2)
            penalised = (repetition != 1) | (presence != 0) | (frequency != 0)
            table = tl.load(table_rows_ptr + request)
            exists = penalised & (table >= 0) & (table < num_tables)
            num_committed = tl.minimum(tl.load(table_sizes_ptr + table, mask=exists, other=0), table_capacity)
            own_ids_ptr += table.to(tl.int64) * table_capacity
            own_counts_ptr += table.to(tl.int64) * table_capacity
            for first in range(0, num_committed, TILE):
                token = tl.load(own_ids_ptr + first + lane, mask=first + lane < num_committed, other=-1)
                set_bits(overlay_ptr, REPLACED, token, (token >= 0) & (token < vocab_size))
            at = node
            parent = tl.load(parents_ptr + at)
            while penalised & (parent >= 0) & (parent < at):
                token = tl.load(tokens_ptr + at)
                set_bits(overlay_ptr, REPLACED, token, (token >= 0) & (token < vocab_size))
                at = parent
                parent = tl.load(parents_ptr + at)
        if HAS_ADDITIONS:
            begin, end = entry_bounds(add_offsets_ptr, request, num_additions)
            for first in range(begin, end, TILE):
                inside = first + lane < end
                token = tl.load(add_ids_ptr + first + lane, mask=inside, other=-1)
                value = tl.load(add_values_ptr + first + lane, mask=inside, other=0.0)
                here = position < tl.load(add_until_ptr + first + lane, mask=inside, other=0)
                wanted = (token >= 0) & (token < vocab_size) & here
                set_bits(overlay_ptr, REPLACED, token, wanted & (value != NEGATIVE_INFINITY))
                set_bits(overlay_ptr, FORBIDDEN, token, wanted & (value == NEGATIVE_INFINITY))
    tl.debug_barrier()
    # number of replaced logits before each word
    before = tl.zeros((), tl.int32)
    for first in range(0, num_words, WORDS):
        word_at = first + step
        word = tl.load(overlay_ptr + word_at * PLANES, mask=word_at < num_words, other=0)
        bits = count_bits(word & 0x7FFFFFFF) + (word < 0).to(tl.int32)
        tl.store(overlay_ptr + word_at * PLANES + 1, before + tl.cumsum(bits, 0) - bits, mask=word_at < num_words)
        before += tl.sum(bits, 0)
    tl.debug_barrier()
    # replaced logits
    if request >= 0:
        if HAS_ADDITIONS:  # tokens with a bias and perhaps no penalty
            begin, end = entry_bounds(add_offsets_ptr, request, num_additions)
            for first in range(begin, end, TILE):
                token = tl.load(add_ids_ptr + first + lane, mask=first + lane < end, other=-1)
                wanted = (token >= 0) & (token < vocab_size)
                level = tl.load(logits_ptr + token, mask=wanted, other=0.0).to(tl.float32)
                store_replacements(overlay_ptr, token, level, wanted, vocab_size, overlay_stride)
            tl.debug_barrier()
        if HAS_PENALTIES:
            # tokens of the path that were never committed; each at its last place there
            at = node
            parent = tl.load(parents_ptr + at)
            while penalised & (parent >= 0) & (parent < at):
                token = tl.load(tokens_ptr + at)
                total, fresh = count_uncommitted(
                    tokens_ptr, parents_ptr, node, at, token, own_ids_ptr, num_committed, vocab_size, TILE
                )
                level = tl.load(logits_ptr + token, mask=fresh, other=0.0).to(tl.float32)
                level = penalise(level, total, repetition, presence, frequency)
                store_replacements(overlay_ptr, token, level, fresh, vocab_size, overlay_stride)
                at = parent
                parent = tl.load(parents_ptr + at)
            for first in range(0, num_committed, TILE):
                inside = first + lane < num_committed
                token = tl.load(own_ids_ptr + first + lane, mask=inside, other=-1).to(tl.int64)
                total = tl.load(own_counts_ptr + first + lane, mask=inside, other=0)
                total += count_on_path(tokens_ptr, parents_ptr, node, token)
                wanted = (token >= 0) & (token < vocab_size)
                level = tl.load(logits_ptr + token, mask=wanted, other=0.0).to(tl.float32)
                level = penalise(level, total, repetition, presence, frequency)
                store_replacements(overlay_ptr, token, level, wanted, vocab_size, overlay_stride)
            tl.debug_barrier()
        if HAS_ADDITIONS:
            begin, end = entry_bounds(add_offsets_ptr, request, num_additions)
            for first in range(begin, end, TILE):
                inside = first + lane < end
                token = tl.load(add_ids_ptr + first + lane, mask=inside, other=-1)
                value = tl.load(add_values_ptr + first + lane, mask=inside, other=0.0)
                here = position < tl.load(add_until_ptr + first + lane, mask=inside, other=0)
                wanted = (token >= 0) & (token < vocab_size) & here & (value != NEGATIVE_INFINITY)
                where, has_bit = find_replacement(overlay_ptr, token, wanted, vocab_size, overlay_stride)
                level = tl.load(overlay_ptr + where, mask=has_bit, other=0).to(tl.float32, bitcast=True)
                tl.store(overlay_ptr + where, (level + value).to(tl.int32, bitcast=True), mask=has_bit)
