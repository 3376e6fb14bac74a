"""Block sizes of the Triton tree attention, as data."""

from __future__ import annotations

from dataclasses import dataclass

from triton import next_power_of_2

INVARIANT_ROWS = 32
"""Query rows of a program in the batch-invariant mode: another number would be another order of addition."""
MAX_PIECES = 32
PROCESSORS = 132
"""Multiprocessors to fill where there is no device to ask."""
JOINED_ROWS = 4
LARGE_SHARED_MEMORY = 160 * 1024
"""Bytes of shared memory that a program may have on the large GPUs (sm_80, sm_90, sm_100)."""
SMALL_SHARED_MEMORY = 99 * 1024
"""And on those with least of it that are served (sm_86, sm_89, sm_120)."""


@dataclass(frozen=True)
class Config:
    """block_m: query rows of a program; block_n: keys of a tile; block_d: width, padded to a power of two;
    registers: of a thread at most, None: as the compiler likes."""

    block_m: int
    block_n: int
    block_d: int
    warps: int
    stages: int
    registers: int | None = None


def choose_config(rows: int, width: int, itemsize: int, narrow: bool = False, frugal: bool = False) -> Config:
    """Config for so many query rows per request and key/value head, head width and bytes per number of a query.

    narrow: the cache holds 8-bit numbers, whose conversion takes registers; frugal: for GPUs with `SMALL_SHARED_MEMORY` bytes of
    shared memory, where one tile less is fetched ahead. Sums are the same with it.

    16 and 32 rows run on warp-level matrix instructions, 64 and 128 on warp-group ones (Hopper). Wide heads, float32
    and narrow caches take smaller tiles or more warps, so that nothing spills and two stages fit in shared memory.
    """
    block_d = max(16, next_power_of_2(width))
    block_m = min(128, max(16, next_power_of_2(rows)))
    if itemsize == 4:
        if block_d > 128:
            return Config(min(block_m, 32), 16, block_d, 8, 2)
        return Config(min(block_m, 32 if block_d <= 64 else 16), 32, block_d, 4, 2)
    if block_d > 128:
        if narrow or block_m <= 32:
            return Config(min(block_m, 32), 32, block_d, 8 if block_m > 16 else 4, 2, 255)
        return Config(64, 16, block_d, 8, 2)
    if block_m == 128:  # a multiprocessor holds one; ptxas may aim at two and spill
        return Config(128, 32 if narrow or width != block_d else 64, block_d, 8, 2 if frugal else 3, 255)
    registers = 255 if narrow and block_m <= 32 else None
    return Config(block_m, 32 if block_m > 32 or narrow else 64, block_d, 4, 3 if frugal else 4, registers)


def programs_per_processor(config: Config) -> int:
    """Programs of a multiprocessor on a fixed grid."""
    return 1 if config.warps > 4 else 2


def choose_pieces(blocks: int, capacity: int, config: Config, processors: int = PROCESSORS) -> int:
    """Into how many pieces keys are cut, so that blocks x pieces fill the processors about twice; a power of two."""
    if config.block_m >= 128:
        return 1
    wanted = min(2 * processors // max(1, blocks), capacity // (4 * config.block_n), MAX_PIECES)
    return 1 << max(0, wanted.bit_length() - 1)


def combine_tile(count: int, block_d: int) -> tuple[int, int]:
    """(pieces, heads) of a tile of the joining kernel: about 4,096 numbers."""
    block_p = min(MAX_PIECES, next_power_of_2(count))
    return block_p, max(1, 4096 // (block_p * block_d))


def combine_shares_tile(block_d: int) -> tuple[int, int]:
    """(rows, parts) of a tile of the kernel that joins shares: about 4,096 numbers."""
    return JOINED_ROWS, max(1, 4096 // (JOINED_ROWS * block_d))
