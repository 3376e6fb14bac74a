"""Block sizes of the Triton tree attention: one `Config` per rows, head width and dtype."""

from __future__ import annotations

from dataclasses import dataclass

from triton import next_power_of_2

INVARIANT_ROWS = 32
"""Query rows of a program in the batch-invariant mode. Another number would be another order of addition."""
MAX_PIECES = 32
PROCESSORS = 132
"""Multiprocessors to fill if there is no device to query."""
COMBINED_ROWS = 4
LARGE_SHARED_MEMORY = 160 * 1024
"""Bytes of shared memory of a program on large GPUs (sm_80, sm_90, sm_100)."""
SMALL_SHARED_MEMORY = 99 * 1024
"""Bytes of shared memory of a program on the smallest GPUs that are served (sm_86, sm_89, sm_120)."""


@dataclass(frozen=True)
class Config:
    """Launch configuration of a kernel.

    Attributes:
        block_m: Query rows of a program.
        block_n: Keys of a tile.
        block_d: Head width, padded to a power of two.
        warps: Warps of a program.
        stages: Tiles that are loaded ahead.
        registers: Most registers of a thread; None leaves them to the compiler.
    """

    block_m: int
    block_n: int
    block_d: int
    warps: int
    stages: int
    registers: int | None = None


def choose_config(rows: int, width: int, itemsize: int, narrow: bool = False, frugal: bool = False) -> Config:
    """Chooses block sizes.

    16 and 32 rows run on warp-level matrix instructions, 64 and 128 on warp-group ones (Hopper). Wide heads, float32
    and narrow caches take smaller tiles or more warps, so that nothing spills and two stages fit in shared memory.

    Args:
        rows: Query rows per request and key/value head.
        width: Width of a head.
        itemsize: Bytes per element of a query.
        narrow: Whether the cache holds 8-bit numbers, whose conversion takes registers.
        frugal: Whether a program has only `SMALL_SHARED_MEMORY`. It prefetches one tile less; sums stay the same.

    Returns:
        The configuration.
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
    if block_m == 128:  # a multiprocessor holds one program; ptxas may aim at two and spill
        return Config(128, 32 if narrow or width != block_d else 64, block_d, 8, 2 if frugal else 3, 255)
    registers = 255 if narrow and block_m <= 32 else None
    return Config(block_m, 32 if block_m > 32 or narrow else 64, block_d, 4, 3 if frugal else 4, registers)


def programs_per_processor(config: Config) -> int:
    """Returns the programs of a multiprocessor on a fixed grid."""
    return 1 if config.warps > 4 else 2


def choose_pieces(blocks: int, capacity: int, config: Config, processors: int = PROCESSORS) -> int:
    """Returns the number of pieces of the keys, a power of two: blocks x pieces fill the processors about twice."""
    if config.block_m >= 128:
        return 1
    wanted = min(2 * processors // max(1, blocks), capacity // (4 * config.block_n), MAX_PIECES)
    return 1 << max(0, wanted.bit_length() - 1)


def combine_tile(count: int, block_d: int) -> tuple[int, int]:
    """Returns (pieces, heads) of a tile of `combine_pieces`, about 4,096 elements."""
    block_p = min(MAX_PIECES, next_power_of_2(count))
    return block_p, max(1, 4096 // (block_p * block_d))


def combine_shares_tile(block_d: int) -> tuple[int, int]:
    """Returns (rows, parts) of a tile of `combine_shares`, about 4,096 elements."""
    return COMBINED_ROWS, max(1, 4096 // (COMBINED_ROWS * block_d))
