"""Launch of the Triton tree attention: block sizes as data, checks of arguments, and the two kernels' calls."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from triton import next_power_of_2

from ..machine_code import ARCHITECTURES, Variant

PIECE_SLOTS = 1024
"""Slots of a piece in the batch-invariant mode: pieces then begin at fixed places whatever else is in the batch."""
INVARIANT_ROWS = 32
"""Query rows of a program in that mode: another number would be another order of addition."""
MOST_PIECES = 32
PROCESSORS = 132
"""Multiprocessors to fill where there is no device to ask."""
WIDEST = 256
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Config:
    """block_m: query rows of a program; block_n: keys of a tile; block_d: width, padded to a power of two."""

    block_m: int
    block_n: int
    block_d: int
    warps: int
    stages: int


def choose(rows: int, width: int, itemsize: int, narrow: bool = False) -> Config:
    """Config for so many query rows per request and key/value head, head width and bytes per number of a query.

    narrow: the cache holds 8-bit numbers, whose conversion takes registers.

    16 and 32 rows run on warp-level matrix instructions, 64 and 128 on warp-group ones (Hopper). Wide heads and
    float32 take smaller tiles, so that nothing spills and two stages fit in shared memory.
    """
    block_d = max(16, next_power_of_2(width))
    block_m = min(128, max(16, next_power_of_2(rows)))
    if itemsize == 4:
        return Config(min(block_m, 32), 32 if block_d <= 128 else 16, block_d, 4, 2)
    if block_d > 128:
        return Config(min(block_m, 64), 32, block_d, 8 if block_m >= 64 else 4, 2)
    if block_m == 128:
        return Config(128, 64, block_d, 8, 3)
    return Config(block_m, 32 if block_m > 32 or narrow else 64, block_d, 4, 4)


def pieces(blocks: int, capacity: int, config: Config, processors: int = PROCESSORS) -> int:
    """Into how many pieces keys are cut, so that blocks x pieces fill the processors about twice; a power of two."""
    if config.block_m >= 128:
        return 1
    wanted = min(2 * processors // max(1, blocks), capacity // (4 * config.block_n), MOST_PIECES)
    return 1 << max(0, wanted.bit_length() - 1)


def joint(count: int, block_d: int) -> tuple[int, int]:
    """(pieces, heads) of a tile of the joining kernel: about 4,096 numbers."""
    block_p = min(MOST_PIECES, next_power_of_2(count))
    return block_p, max(1, 4096 // (block_p * block_d))


@lru_cache(maxsize=8)
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else PROCESSORS


@dataclass(frozen=True)
class Shape:
    """How one call is cut: all of it known from shapes, nothing from lengths."""

    config: Config
    blocks: int
    pieces: int
    piece_tiles: int


@lru_cache(maxsize=4096)
def _cut(
    nodes: int, batch: int, heads: int, kv_heads: int, width: int, itemsize: int, narrow: bool, capacity: int,
    invariant: bool, processors: int,
) -> Shape:  # fmt: skip
    group = heads // kv_heads
    rows = INVARIANT_ROWS if invariant else -(-nodes // max(1, batch)) * group
    config = choose(rows, width, itemsize, narrow)
    blocks = nodes * group // config.block_m + batch + 1
    if invariant:
        return Shape(config, blocks, max(1, -(-capacity // PIECE_SLOTS)), PIECE_SLOTS // config.block_n)
    return Shape(config, blocks, pieces(blocks * kv_heads, capacity, config, processors), 0)


def cut(query: Tensor, key_cache: Tensor, page_table: Tensor, batch_invariant: bool = False) -> Shape:
    """How a call with these tensors is cut."""
    nodes, heads, width = query.shape
    batch, columns = page_table.shape
    _, page_size, kv_heads, _ = key_cache.shape
    narrow = key_cache.element_size() == 1
    shape = (nodes, batch, heads, kv_heads, width, query.element_size(), narrow, columns * page_size)
    return _cut(*shape, batch_invariant, _processors(query.device))


def workspace_size(query: Tensor, key_cache: Tensor, page_table: Tensor, batch_invariant: bool = False) -> int:
    """float32 numbers that `tree_attention(..., workspace=)` needs for tensors of these shapes; 0: none."""
    count = cut(query, key_cache, page_table, batch_invariant).pieces
    return 0 if count == 1 else count * query.shape[0] * query.shape[1] * (query.shape[2] + 1)


def why_not(query: Tensor, key_cache: Tensor, *args: object, **kwargs: object) -> str | None:
    """Reasons of shapes and dtypes that the kernels do not serve."""
    if query.dtype not in DTYPES:
        return f"queries are {query.dtype}; served are float32, bfloat16 and float16"
    if key_cache.dtype not in (query.dtype, torch.float8_e4m3fn):
        return f"the cache is {key_cache.dtype}; served are {query.dtype} and float8_e4m3fn"
    old = query.is_cuda and torch.cuda.get_device_capability(query.device) < (8, 9)
    if key_cache.dtype == torch.float8_e4m3fn and old:
        return "this GPU has no float8_e4m3fn; sm_89 and later have"
    if query.shape[-1] > WIDEST:
        return f"heads are {query.shape[-1]} wide; served are up to {WIDEST}"
    return None


def _check(query: Tensor, caches: tuple[Tensor, Tensor], integers: dict[str, Tensor | None], out: Tensor) -> None:
    """Raises ValueError for shapes, dtypes, devices and strides that the kernels cannot take; looks at no data."""
    nodes, heads, width = query.shape
    kv_heads = caches[0].shape[2]
    op = "tree_attention"
    if heads % kv_heads:
        raise ValueError(f"{op}: query has {heads} heads, expected a multiple of the cache's {kv_heads}")
    for name, each in (("key_cache", caches[0]), ("value_cache", caches[1])):
        if each.ndim != 4 or each.shape != caches[0].shape or each.shape[3] != width or each.dtype != caches[0].dtype:
            raise ValueError(
                f"{op}: {name} is {each.dtype} {list(each.shape)}, expected {caches[0].dtype} [pages, page_size, "
                f"{kv_heads}, {width}] like query and the other cache"
            )
    for name, strided in (("query", query), ("key_cache", caches[0]), ("value_cache", caches[1]), ("out", out)):
        if strided.stride(-1) != 1 and strided.shape[-1] > 1:
            raise ValueError(f"{op}: {name} has a strided last axis, expected a contiguous one; call .contiguous()")
    if out.shape != query.shape or out.dtype != query.dtype:
        raise ValueError(f"{op}: out is {out.dtype} {list(out.shape)}, expected {query.dtype} {list(query.shape)}")
    table = integers["page_table"]
    batch = table.shape[0] if table is not None and table.ndim == 2 else -1
    expected = {"lengths": (batch,), "offsets": (batch + 1,), "depth": (nodes,)}
    for name, index in integers.items():
        if index is None:
            continue
        fits = index.ndim == 2 if name in ("page_table", "ancestors") else tuple(index.shape) == expected[name]
        if index.dtype != torch.int32 or not fits or index.stride(-1) not in (1, 0) or index.device != query.device:
            raise ValueError(
                f"{op}: {name} is {index.dtype} {list(index.shape)} on {index.device}, expected int32 "
                f"{list(expected.get(name, ('rows', 'columns')))} on {query.device} with a contiguous last axis"
            )
    words = integers["ancestors"]
    if words is not None and (words.shape[0] != nodes or not words.is_contiguous()):
        raise ValueError(
            f"{op}: ancestors is {list(words.shape)}, expected contiguous [{nodes}, W]; call .contiguous()"
        )


def tree_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    offsets: Tensor,
    ancestors: Tensor | None = None,
    depth: Tensor | None = None,
    *,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    workspace: Tensor | None = None,
    batch_invariant: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The operator on Triton kernels: one launch for one piece, two for several. See the reference for arguments."""
    from .triton_kernel import attend, combine

    result = torch.empty_like(query) if out is None else out
    integers = {
        "page_table": page_table,
        "lengths": lengths,
        "offsets": offsets,
        "ancestors": ancestors,
        "depth": depth,
    }
    _check(query, (key_cache, value_cache), integers, result)
    if ancestors is not None and window and depth is None:
        raise ValueError("tree_attention: window with ancestors needs depth; pass the depth of every node")
    if (key_scale is None) != (value_scale is None):
        raise ValueError(
            "tree_attention: key_scale and value_scale go together, expected float32 [Hkv] each or neither"
        )
    nodes, heads, width = query.shape
    pages, page_size, kv_heads, _ = key_cache.shape
    batch, columns = page_table.shape
    lse = torch.empty(nodes, heads, dtype=torch.float32, device=query.device) if return_lse else None
    if nodes == 0:
        return result if lse is None else (result, lse)
    shape = cut(query, key_cache, page_table, batch_invariant)
    config, count = shape.config, shape.pieces
    part = part_lse = None
    if count > 1:
        size = count * nodes * heads
        if workspace is None:
            workspace = torch.empty(size * (width + 1), dtype=torch.float32, device=query.device)
        elif (
            workspace.dtype != torch.float32 or workspace.numel() < size * (width + 1) or not workspace.is_contiguous()
        ):
            raise ValueError(
                f"tree_attention: workspace is {workspace.dtype} {list(workspace.shape)}, expected contiguous float32 "
                f"of at least {size * (width + 1)} numbers; workspace_size() tells how many"
            )
        part, part_lse = workspace.view(-1)[: size * width], workspace.view(-1)[size * width : size * (width + 1)]
    with torch.cuda.device_of(query):
        attend[(shape.blocks, kv_heads, count)](
            query, key_cache, value_cache, page_table, lengths, offsets, ancestors, depth, sinks, result, lse, part,
            part_lse, key_scale, value_scale, scale if softcap else scale * LOG2_E, softcap, window, batch, nodes,
            pages, columns, page_table.stride(0), 0 if ancestors is None else ancestors.shape[1],
            query.stride(0), query.stride(1), key_cache.stride(0), key_cache.stride(1), key_cache.stride(2),
            value_cache.stride(0), value_cache.stride(1), value_cache.stride(2), result.stride(0), result.stride(1),
            HEADS=heads, GROUP=heads // kv_heads, PAGE=page_size, WIDTH=width, BLOCK_D=config.block_d,
            BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_B=next_power_of_2(batch + 1), PIECES=count,
            PIECE_TILES=shape.piece_tiles, CAUSAL=ancestors is None, WINDOW=window > 0, SOFTCAP=softcap > 0,
            SINKS=sinks is not None, LSE=return_lse, SCALED=key_scale is not None,
            ALIKE=key_cache.stride() == value_cache.stride(), num_warps=config.warps, num_stages=config.stages,
        )  # fmt: skip
        if count > 1:
            block_p, block_h = joint(count, config.block_d)
            combine[(nodes, -(-heads // block_h))](
                part, part_lse, sinks, offsets, result, lse, batch, nodes, result.stride(0), result.stride(1),
                HEADS=heads, WIDTH=width, BLOCK_D=config.block_d, BLOCK_H=block_h, BLOCK_P=block_p, PIECES=count,
                SINKS=sinks is not None, LSE=return_lse, num_warps=4,
            )  # fmt: skip
    return result if lse is None else (result, lse)


def _attend(
    name: str, dtype: str, config: Config, everyday: tuple[str, ...], kv: str = "", **special: object
) -> Variant:
    kv = kv or dtype
    constants: dict[str, object] = {
        "HEADS": 32, "GROUP": 4, "PAGE": 16, "WIDTH": 128, "BLOCK_D": config.block_d, "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n, "BLOCK_B": 16, "PIECES": 8, "PIECE_TILES": 0, "CAUSAL": False, "WINDOW": False,
        "SOFTCAP": False, "SINKS": False, "LSE": False, "SCALED": False, "ALIKE": True,
    }  # fmt: skip
    constants.update(special)
    arguments = {
        "query": f"*{dtype}", "key_cache": f"*{kv}", "value_cache": f"*{kv}", "table": "*i32", "lengths": "*i32",
        "offsets": "*i32", "ancestors": "*i32", "depth": "*i32", "sinks": "*fp32", "out": f"*{dtype}", "lse": "*fp32",
        "part": "*fp32", "part_lse": "*fp32", "key_scale": "*fp32", "value_scale": "*fp32", "scale": "fp32",
        "softcap": "fp32", "window": "i32", "batch": "i32", "nodes": "i32", "pages": "i32", "pages_per_row": "i32",
        "table_row": "i32", "words_per_node": "i32", "q_node": "i32:16", "q_head": "i32:16", "k_page": "i32:16",
        "k_slot": "i32:16", "k_head": "i32:16", "v_page": "i32:16", "v_slot": "i32:16", "v_head": "i32:16",
        "o_node": "i32:16", "o_head": "i32:16",
    }  # fmt: skip
    return Variant(
        f"tree_attention/{name}", "tree_attention.triton_kernel:attend", arguments, constants, config.warps,
        config.stages, everyday, ARCHITECTURES if kv == dtype else ("sm_90", "sm_100"),
    )  # fmt: skip


def _combine(name: str, count: int, everyday: tuple[str, ...], **special: object) -> Variant:
    constants = {"HEADS": 32, "WIDTH": 128, "BLOCK_D": 128, "PIECES": count, "SINKS": False, "LSE": False, **special}
    constants["BLOCK_P"], constants["BLOCK_H"] = joint(count, int(str(constants["BLOCK_D"])))
    arguments = {
        "part": "*fp32", "part_lse": "*fp32", "sinks": "*fp32", "offsets": "*i32", "out": "*bf16", "lse": "*fp32",
        "batch": "i32", "nodes": "i32", "o_node": "i32:16", "o_head": "i32:16",
    }  # fmt: skip
    kernel = "tree_attention.triton_kernel:combine"
    return Variant(f"tree_attention/{name}", kernel, arguments, constants, everyday=everyday)


_NOW = ("sm_90",)
VARIANTS = [
    *(_attend(f"bf16 rows {rows}", "bf16", choose(rows, 128, 2), _NOW) for rows in (16, 32, 128)),
    _attend("bf16 rows 64", "bf16", choose(64, 128, 2), ARCHITECTURES),
    _attend("bf16 rows 16 page 64", "bf16", choose(16, 128, 2), (), PAGE=64),
    _attend("bf16 rows 16 page 1", "bf16", choose(16, 128, 2), (), PAGE=1),
    _attend("bf16 rows 64 width 64", "bf16", choose(64, 64, 2), (), WIDTH=64),
    _attend("bf16 rows 16 width 80", "bf16", choose(16, 80, 2), (), WIDTH=80),
    _attend("bf16 rows 16 width 96", "bf16", choose(16, 96, 2), (), WIDTH=96),
    _attend("bf16 rows 16 width 256", "bf16", choose(16, 256, 2), (), WIDTH=256),
    _attend("bf16 rows 32 width 256", "bf16", choose(32, 256, 2), (), WIDTH=256),
    _attend("bf16 rows 64 width 256", "bf16", choose(64, 256, 2), _NOW, WIDTH=256),
    _attend("bf16 rows 128 width 64", "bf16", choose(128, 64, 2), (), WIDTH=64),
    _attend("bf16 prefill", "bf16", choose(128, 128, 2), _NOW, CAUSAL=True, PIECES=1),
    _attend("bf16 rows 32 window and softcap", "bf16", choose(32, 128, 2), _NOW, WINDOW=True, SOFTCAP=True, LSE=True),
    _attend("bf16 rows 64 one piece", "bf16", choose(64, 128, 2), (), PIECES=1, SINKS=True, LSE=True),
    _attend("bf16 fixed pieces", "bf16", choose(INVARIANT_ROWS, 128, 2), (), PIECE_TILES=16),
    _attend("fp16 rows 32", "fp16", choose(32, 128, 2), ()),
    _attend("fp32 rows 16", "fp32", choose(16, 128, 4), _NOW),
    _attend("fp32 rows 32 width 64", "fp32", choose(32, 64, 4), (), WIDTH=64),
    _attend("bf16 rows 16 fp8 cache", "bf16", choose(16, 128, 2, True), _NOW, kv="fp8e4nv", SCALED=True),
    _attend("bf16 rows 64 fp8 cache", "bf16", choose(64, 128, 2, True), (), kv="fp8e4nv", SCALED=True),
    _combine("join 8", 8, _NOW),
    _combine("join 32 sinks", 32, (), SINKS=True, LSE=True),
]
