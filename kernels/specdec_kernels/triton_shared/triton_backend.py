"""Triton backends: when they can serve a call, and how their kernels run on tensors of the CPU, for tests.

With TRITON_INTERPRET=1 in the environment before triton is first imported, kernels run in Triton's interpreter on CPU
tensors: slowly, program after program, but the same source. Then the backends can be wished for
(``use_backend("triton")``); they are never chosen on their own.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Hashable
from functools import lru_cache
from itertools import chain
from typing import Any

import torch

from ..dispatch.devices import gpu_unavailable_reason, require_one_device, why_not_on_device
from ..dispatch.extras import install_hint
from ..dispatch.operator import Backend

INTERPRETED = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")
"""Whether kernels of this process run in the interpreter; triton reads the variable once, so this is per process."""


@lru_cache(maxsize=1)
def unavailable_reason() -> str | None:
    """Why no Triton kernel can run here, or None."""
    if importlib.util.find_spec("triton") is None:
        return f"triton is not installed; {install_hint('gpu')}"
    reason = None if INTERPRETED else gpu_unavailable_reason()
    return None if reason is None else f"{reason} (`make lane-interpreter` tests the kernels there)"


def not_worth(*args: Any, **kwargs: Any) -> str | None:
    """Keeps the automatic choice away from the interpreter."""
    return "Triton's interpreter is for tests" if INTERPRETED else None


def half_or_single(logits: object, *args: Any, **kwargs: Any) -> str | None:
    """Why kernels that compute in float32 cannot take these logits (a tensor, or the first of a distribution), or
    None.
    """
    first = logits[0] if isinstance(logits, (tuple, list)) and logits else logits
    if isinstance(first, torch.Tensor) and first.dtype == torch.float64:
        return "float64 logits; this kernel computes in float32"
    return None


def _both(places: dict[str, int], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    return [args[place] if place < len(args) else kwargs.get(name) for name, place in places.items()]


def dists_half_or_single(**places: int) -> Callable[..., str | None]:
    """`half_or_single` for an operator that takes distributions, or logits, under these names and at these places."""

    def why_not(*args: Any, **kwargs: Any) -> str | None:
        return next(filter(None, map(half_or_single, _both(places, args, kwargs))), None)

    return why_not


def dists_key(**places: int) -> Callable[..., Hashable]:
    """Signature of an operator on packed nodes: the device of its tokens and the dtypes of its distributions, or
    logits.

    A call is a few microseconds, so distributions that are given by place are not looked for by name."""

    at, last = tuple(places.values()), max(places.values())

    def dtype(dist: Any) -> torch.dtype | None:
        first = dist[0] if isinstance(dist, (tuple, list)) and dist else dist
        return getattr(first, "dtype", None)

    def key(*args: Any, **kwargs: Any) -> Hashable:
        tokens = args[0] if args else kwargs["tokens"]
        dists = [args[place] for place in at] if len(args) > last else _both(places, args, kwargs)
        return (tokens.is_cpu or tokens.device, *map(dtype, dists))

    return key


def triton_backend(
    load: Callable[[], Callable[..., Any]],
    why_not: Callable[..., str | None] | None = None,
    name: str = "triton",
) -> Backend:
    """Backend whose kernels are written in Triton: for tensors on a GPU, or on the CPU in the interpreter."""
    kind = "cpu" if INTERPRETED else "cuda"

    def check(*args: Any, **kwargs: Any) -> str | None:
        return why_not_on_device(kind, chain(args, kwargs.values())) or (why_not(*args, **kwargs) if why_not else None)

    return Backend(name, lambda: require_one_device(load()), check, unavailable_reason, not_worth=not_worth)
