"""torch.ops.specdec.* for tensors on a GPU: the schemas of the extension, served by the Triton launches.

The extension declares every operator and serves the CPU. This module registers the launches under the CUDA key, for
torch.compile, other languages and direct calls of torch.ops.specdec. Calls through `Op` reach the launches without this
detour. Each function takes the arguments of its schema, where distributions are spread out.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from .debug_mode import is_capturing
from .devices import require_one_device
from .operator import UnsupportedError
from .registry import OPS


@lru_cache(maxsize=64)
def _find_launch(place: str) -> Callable[..., Any]:
    """Imports a launch given as "operator" or "operator:function", with its checks."""
    folder, _, name = place.partition(":")
    found: Callable[..., Any] = getattr(import_module(f"specdec_kernels.ops.{folder}.launch"), name or folder)
    return OPS[found.__name__].with_data_check(require_one_device(found))


def _pass_through(place: str, **options: Any) -> Callable[..., Any]:
    return lambda *args: _find_launch(place)(*args, **options)


def _pack_optional(parts: Sequence[Any]) -> tuple[Any, ...] | None:
    """Packs a distribution or two matrices of noise into a tuple; None if the schema has None there."""
    return None if parts[0] is None else tuple(parts)


def _draft_sample(*args: Any) -> Tensor:
    return _find_launch("draft_sample")(*args[:8], mass=args[8])


def _plan_tensors(plan: Any) -> tuple[Tensor, ...]:
    return plan.depth, plan.row, plan.ancestors, plan.first_child, plan.next_sibling


def _tree_plan(parents: Tensor, offsets: Tensor) -> tuple[Tensor, ...]:
    from ..ops.tree_plan.launch import why_not
    from ..ops.tree_plan.reference import tree_plan as reference

    # the schema has no bound on the nodes of a tree, so the kernel may not fit
    run = reference if why_not(parents, offsets) else _find_launch("tree_plan")
    return _plan_tensors(run(parents, offsets))


def _exact_match_verify(*args: Any) -> tuple[Tensor, ...]:
    return _find_launch("exact_match_verify")(*args[:6], max_depth=args[6])


def _replay_verify(*args: Any) -> tuple[Tensor, ...]:
    return _find_launch("replay_verify")(*args[:6], tuple(args[6:10]), *args[10:12], max_depth=args[12])


def _typical_verify(*args: Any) -> tuple[Tensor, ...]:
    limit = dict(zip(("epsilon", "delta", "max_depth"), args[12:]))
    return _find_launch("typical_verify")(*args[:4], _pack_optional(args[4:9]), *args[9:12], **limit)


def _rule_name(block: bool) -> str:
    return "block" if block else "rejection"


def _rejection_verify(*args: Any) -> tuple[Tensor, ...]:
    *_, max_depth, block, mass = args
    return _find_launch("rejection_verify")(
        *args[:4], _pack_optional(args[4:9]), _pack_optional(args[9:14]), *args[14:18],
        _pack_optional(args[18:20]), max_depth=max_depth, rule=_rule_name(block), mass=mass,
    )  # fmt: skip


def _rejection_verify_logits(*args: Any) -> tuple[Tensor, ...]:
    return _find_launch("rejection_verify:rejection_verify_logits")(
        *args[:5],
        tuple(args[5:9]),
        _pack_optional(args[9:14]),
        *args[14:17],
        max_depth=args[17],
        rule=_rule_name(args[18]),
    )


def _rejection_thresholds(*args: Any) -> tuple[Tensor, ...]:
    dists = _pack_optional(args[4:9]), _pack_optional(args[9:14])
    return _find_launch("rejection_verify:rejection_thresholds")(*args[:4], *dists, args[14], rule=_rule_name(args[15]))


def _tree_verify(place: str) -> Callable[..., Any]:
    def verify(*args: Any) -> tuple[Tensor, ...]:
        dists = _pack_optional(args[6:11]), _pack_optional(args[11:16])
        noise = (*args[18:21], _pack_optional(args[21:23]))
        return _find_launch(place)(*args[:6], *dists, *args[16:18], *noise, max_depth=args[23])

    return verify


def _tree_thresholds(place: str) -> Callable[..., Any]:
    return lambda *args: _find_launch(place)(
        *args[:6], _pack_optional(args[6:11]), _pack_optional(args[11:16]), *args[16:18]
    )


def _process_logits(*args: Any) -> None:
    from ..ops.process_logits.processors import Additions, Forced, NodePaths, Penalties, TokenMasks

    def build(kind: Any, start: int, stop: int) -> Any:
        return None if args[start] is None else kind(*args[start:stop])

    processors = build(Penalties, 6, 11), build(Additions, 11, 15), build(Forced, 15, 18), build(TokenMasks, 18, 20)
    _find_launch("process_logits")(args[0], NodePaths(*args[1:6]), *processors)


_TABLES: OrderedDict[Any, Any] = OrderedDict()  # in order of use, the latest last
_CAPTURED: dict[Any, Any] = {}
MAX_TABLES = 256


def _find_table(caches: Sequence[Tensor]) -> Any:
    """Returns the `CacheTable` of a list of caches, from a cache of tables.

    The key is what the table holds: addresses, shapes and strides, and the stream. A cached table keeps no caches
    alive, and other tensors at the same address with the same layout have the same table.

    The allocator may reuse the memory of a dropped table at once on the stream that made it, so each stream has tables
    of its own. Graphs read a table again at every replay, so a captured table is never dropped. A capture permits no
    copy from the host, so a capture on a new stream takes the table of any other stream.
    """
    from ..ops.kv_commit.cache_table import CacheTable

    layout = tuple((cache.data_ptr(), cache.device, cache.dtype, cache.shape, cache.stride()) for cache in caches)
    on_gpu = bool(caches) and caches[0].device.type == "cuda"
    key = layout, torch.cuda.current_stream(caches[0].device).cuda_stream if on_gpu else 0
    capturing = on_gpu and torch.cuda.is_current_stream_capturing()
    known = _TABLES.pop(key, None)
    if known is None:
        known = _CAPTURED.get(key)
    if known is None and capturing:
        tables = [*_CAPTURED.items(), *_TABLES.items()]
        known = next((table for (other_layout, _), table in tables if other_layout == layout), None)
    if known is None:
        known = CacheTable(caches).holding(())
    _TABLES[key] = known
    if len(_TABLES) > MAX_TABLES:
        _TABLES.popitem(last=False)
    if capturing:
        _CAPTURED[key] = known
    return known.holding(caches)


def _kv_commit(caches: Sequence[Tensor], *args: Any) -> None:
    _find_launch("kv_commit")(_find_table(caches), *args)


_PLANS: ContextVar[dict[Any, Any] | None] = ContextVar("plans of the attention of a pass", default=None)
"""Plans of the attention calls of the current forward pass; None outside of `share_attention_plans`."""


@contextmanager
def share_attention_plans() -> Iterator[None]:
    """Shares plans among the calls of torch.ops.specdec.tree_attention inside the block: one forward pass.

    Compiled programs use it, because traced code makes no plan. Calls of one kind agree in shape and dtype of their
    queries, in dtype, page size, heads and width of their keys, and in the window, as those of all layers do. The first
    of them makes the plan from its page table, lengths, offsets and ancestors. The others reuse it without comparing
    theirs, so these must be the same throughout the block. The block counts for its own thread and context; a nested
    block starts without plans.

    Yields:
        Nothing. The plans are dropped when the block ends.
    """
    token = _PLANS.set({})
    try:
        yield
    finally:
        _PLANS.reset(token)


def _find_plan(args: Sequence[Any]) -> Any:
    """Returns the plan of a call of tree_attention, or None outside of `share_attention_plans`."""
    plans = _PLANS.get()
    if plans is None:
        return None
    query, keys, window = args[0], args[1], args[10]
    kind = (query.shape, query.dtype, keys.shape[1:], keys.dtype, window)
    if kind not in plans:
        plan_for = import_module("specdec_kernels.ops.tree_attention").plan_for
        _, _, _, page_table, lengths, offsets, ancestors = args[:7]
        plans[kind] = plan_for(query, keys, page_table, lengths, offsets, ancestors, window=window)
    return plans[kind]


def _attention_options(args: Sequence[Any]) -> dict[str, Any]:
    return {**dict(zip(("scale", "softcap", "window", "sinks"), args[8:12])), "plan": _find_plan(args)}


def _attention_out(*args: Any) -> None:
    out, lse = args[12], args[13]
    _find_launch("tree_attention")(*args[:8], **_attention_options(args), out=out, return_lse=lse is not None, lse=lse)


def _tree_expand(*args: Any) -> tuple[Tensor, ...]:
    names = "width", "keep", "sharpness", "seeds", "positions"
    return _find_launch("tree_expand")(*args[:6], **dict(zip(names, args[6:])))


def _tree_grow(*args: Any) -> tuple[Tensor, ...]:
    from ..ops.tree_grow.reference import Growth

    table = dict(zip(("tokens", "scores", "parents", "nodes", "limits"), args[5:10]))
    growth = Growth(**table, keep=args[12])
    names = "level", "width", "last", "sharpness", "seeds", "positions"
    options = dict(zip(names, (*args[10:12], *args[13:])))
    tokens, parents, counts, plan = _find_launch("tree_grow")(*args[:5], growth, **options)
    return tokens, parents, counts, *_plan_tensors(plan)


def _tree_conv(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    window: Tensor,
    rows: Tensor,
    lengths: Tensor,
    offsets: Tensor,
    parents: Tensor | None = None,
    silu: bool = False,
    advance: bool = False,
    isa: int = 0,
) -> Any:
    given = (inputs, weight, bias, window, rows, lengths, offsets, parents)
    return _launch_or_reference("tree_conv", *given, "silu" if silu else None, advance)


def _launch_or_reference(name: str, *args: Any, **named: Any) -> Any:
    """Runs the launch of an operator, or its reference for dtypes and sizes that the kernels do not take.

    Returns:
        The results of the operator.

    Raises:
        UnsupportedError: In a capture, which the reference would end by reading from the device.
    """
    op = OPS[name]
    triton = next(each for each in op.backends if each.name == "triton")
    if (reason := triton.why_not(*args, **named)) is not None and is_capturing():
        raise UnsupportedError(f"{name}: {reason}; its reference cannot be captured; call it outside of CUDA graphs")
    return (_find_launch(name) if reason is None else op.reference)(*args, **named)


def _without_isa(name: str, most: int) -> Callable[..., Any]:
    """Passes the arguments of a schema on, but not `isa`, which comes after `most` others."""

    def run(*args: Any, isa: int = 0, **named: Any) -> Any:
        return _launch_or_reference(name, *args[:most], **named)

    return run


LAUNCHES: dict[str, Callable[..., Any]] = {
    "distribution_stats": _pass_through("distribution_stats"),
    "dist_masses": _pass_through("distribution_stats", masses=True),
    "replay_sample": _pass_through("replay_sample"),
    "draft_sample": _draft_sample,
    "tree_plan": _tree_plan,
    "exact_match_verify": _exact_match_verify,
    "replay_verify": _replay_verify,
    "rejection_verify": _rejection_verify,
    "rejection_verify_logits": _rejection_verify_logits,
    "rejection_thresholds": _rejection_thresholds,
    "recursive_rejection_verify": _tree_verify("recursive_rejection_verify"),
    "recursive_rejection_thresholds": _tree_thresholds("recursive_rejection_verify:recursive_rejection_thresholds"),
    "traversal_verify": _tree_verify("traversal_verify"),
    "typical_verify": _typical_verify,
    "traversal_thresholds": _tree_thresholds("traversal_verify:traversal_thresholds"),
    "process_logits": _process_logits,
    "tree_expand": _tree_expand,
    "tree_grow": _tree_grow,
    "ngram_match": _pass_through("ngram_match"),
    "kv_slots": _pass_through("kv_slots"),
    "kv_commit": _kv_commit,
    "kv_commit_pages": _pass_through("kv_commit:kv_commit_pages"),
    "kv_stage": _pass_through("kv_stage"),
    "tree_attention": lambda *args: _find_launch("tree_attention")(*args[:8], **_attention_options(args)),
    "tree_attention_lse": lambda *args: _find_launch("tree_attention")(
        *args[:8], **_attention_options(args), return_lse=True
    ),
    "tree_attention_out": _attention_out,
    "tree_conv": _tree_conv,
    "tree_delta": _without_isa("tree_delta", 11),
    "tree_ssm": _without_isa("tree_ssm", 11),
    "state_commit": _without_isa("state_commit", 8),
    "window_commit": _pass_through("state_commit:window_commit"),
}
"""Launch that serves each operator of torch.ops.specdec on a GPU, by name."""


def register_launches(key: str = "CUDA", override: bool = False) -> torch.library.Library:
    """Registers the launches under a dispatch key.

    Args:
        key: Dispatch key.
        override: Whether to replace kernels that the extension registered there (kv_stage in CUDA C++).

    Returns:
        The library. The registration holds as long as it lives.
    """
    library = torch.library.Library("specdec", "IMPL")
    for name, launch in LAUNCHES.items():
        known = hasattr(torch.ops.specdec, name)
        taken = known and torch._C._dispatch_has_kernel_for_dispatch_key(f"specdec::{name}", key)
        if known and (override or not taken):
            library.impl(name, launch, key, allow_override=override)
    return library
