"""Triton backends: the calls that they can serve, on a GPU or, for tests, in Triton's interpreter on a CPU.

With TRITON_INTERPRET=1 in the environment before triton is first imported, kernels run in Triton's interpreter on CPU
tensors: the same source, but slow and one program after another. The backends then serve explicit requests
(``use_backend("triton")``) and are never selected automatically.

Tests: tests/interpreter/.
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
"""Whether kernels of this process run in the interpreter. Triton reads the variable once per process."""


@lru_cache(maxsize=1)
def unavailable_reason() -> str | None:
    """Returns the reason why no Triton kernel can run here, or None."""
    if importlib.util.find_spec("triton") is None:
        return f"triton is not installed; {install_hint('gpu')}"
    reason = None if INTERPRETED else gpu_unavailable_reason()
    return None if reason is None else f"{reason} (`make lane-interpreter` tests the kernels there)"


def not_worth(*args: Any, **kwargs: Any) -> str | None:
    """Excludes the interpreter from automatic selection."""
    return "Triton's interpreter is for tests" if INTERPRETED else None


def why_not_float64(logits: object, *args: Any, **kwargs: Any) -> str | None:
    """Returns the reason why kernels that compute in float32 cannot take these logits, or None.

    Args:
        logits: A tensor of logits, or a distribution, whose first tensor they are.
        *args: Ignored, like `kwargs`.
        **kwargs: Ignored.
    """
    first = logits[0] if isinstance(logits, (tuple, list)) and logits else logits
    if isinstance(first, torch.Tensor) and first.dtype == torch.float64:
        return "float64 logits; this kernel computes in float32"
    return None


def _arguments_at(places: dict[str, int], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    return [args[place] if place < len(args) else kwargs.get(name) for name, place in places.items()]


def why_not_float64_dists(**places: int) -> Callable[..., str | None]:
    """Makes a `why_not_float64` for an operator that takes several distributions or logits.

    Args:
        **places: Name and position of each of these arguments.

    Returns:
        A `Backend.why_not`.
    """

    def why_not(*args: Any, **kwargs: Any) -> str | None:
        return next(filter(None, map(why_not_float64, _arguments_at(places, args, kwargs))), None)

    return why_not


def dists_signature(**places: int) -> Callable[..., Hashable]:
    """Makes the signature of an operator on packed nodes: device of its tokens, dtypes of its distributions or logits.

    A call takes a few microseconds, so positional arguments are not looked up by name.

    Args:
        **places: Name and position of each distribution or tensor of logits.

    Returns:
        A `key` for `Op`.
    """
    at, last = tuple(places.values()), max(places.values())

    def dtype(dist: Any) -> torch.dtype | None:
        first = dist[0] if isinstance(dist, (tuple, list)) and dist else dist
        return getattr(first, "dtype", None)

    def key(*args: Any, **kwargs: Any) -> Hashable:
        tokens = args[0] if args else kwargs["tokens"]
        dists = [args[place] for place in at] if len(args) > last else _arguments_at(places, args, kwargs)
        return (tokens.is_cpu or tokens.device, *map(dtype, dists))

    return key


def triton_backend(
    load: Callable[[], Callable[..., Any]],
    why_not: Callable[..., str | None] | None = None,
    name: str = "triton",
) -> Backend:
    """Makes a backend of Triton kernels, for tensors on a GPU, or on the CPU in the interpreter.

    Args:
        load: Imports and returns the launch.
        why_not: Returns the reason why the kernels cannot serve a call, or None.
        name: Name of the backend.

    Returns:
        The backend.
    """
    kind = "cpu" if INTERPRETED else "cuda"

    def check(*args: Any, **kwargs: Any) -> str | None:
        return why_not_on_device(kind, chain(args, kwargs.values())) or (why_not(*args, **kwargs) if why_not else None)

    return Backend(name, lambda: require_one_device(load()), check, unavailable_reason, not_worth=not_worth)
