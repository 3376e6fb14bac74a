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
from typing import Any

import torch

from .dispatch import Backend
from .extension import on_device

INTERPRETED = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")
"""Whether kernels of this process run in the interpreter; triton reads the variable once, so this is per process."""


@lru_cache(maxsize=1)
def missing() -> str | None:
    """Why no Triton kernel can run here, or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; `pip install specdec-fast[gpu]`"
    if INTERPRETED or torch.cuda.is_available():
        return None
    return "no CUDA device (TRITON_INTERPRET=1 runs the kernels on the CPU, for tests)"


def not_worth(*args: Any, **kwargs: Any) -> str | None:
    """Keeps the automatic choice away from the interpreter."""
    return "Triton's interpreter is for tests" if INTERPRETED else None


def half_or_single(logits: object, *args: Any, **kwargs: Any) -> str | None:
    """Why kernels that compute in float32 cannot take these logits (a tensor, or the first of a law), or None."""
    first = logits[0] if isinstance(logits, (tuple, list)) and logits else logits
    if isinstance(first, torch.Tensor) and first.dtype == torch.float64:
        return "float64 logits; this kernel computes in float32"
    return None


def _laws(place: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The target's and the draft's law among the arguments of a verify operator, the former at `place`."""
    given = [*args[place : place + 2]]
    return [*given, *(kwargs.get(name) for name in ("target", "draft")[len(given) :])]


def laws_half_or_single(place: int) -> Callable[..., str | None]:
    """`half_or_single` for a verify operator whose target law is argument number `place`, its draft law the next."""

    def why_not(*args: Any, **kwargs: Any) -> str | None:
        return next(filter(None, map(half_or_single, _laws(place, args, kwargs))), None)

    return why_not


def laws_key(place: int) -> Callable[..., Hashable]:
    """Signature of a verify operator: the device of its tokens and the dtypes of the laws."""

    def key(*args: Any, **kwargs: Any) -> Hashable:
        tokens = args[0] if args else kwargs["tokens"]
        laws = args[place : place + 2] if len(args) > place + 1 else _laws(place, args, kwargs)
        return (tokens.device.type, *(law[0].dtype if isinstance(law, (tuple, list)) and law else None for law in laws))

    return key


def triton_backend(
    load: Callable[[], Callable[..., Any]],
    why_not: Callable[..., str | None] | None = None,
    name: str = "triton",
) -> Backend:
    """Backend whose kernels are written in Triton: for tensors on a GPU, or on the CPU in the interpreter."""
    kind = "cpu" if INTERPRETED else "cuda"

    def check(*args: Any, **kwargs: Any) -> str | None:
        return on_device(kind, args or tuple(kwargs.values())) or (why_not(*args, **kwargs) if why_not else None)

    return Backend(name, load, check, missing, not_worth=not_worth)
