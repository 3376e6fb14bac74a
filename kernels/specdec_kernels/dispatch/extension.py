"""The compiled extensions: they are loaded on first use, and an unavailable one has a reason as text."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from . import meta_kernels, torch_ops
from .devices import gpu_unavailable_reason, why_not_on_device
from .operator import Backend

REMEDY = "build it with `pip install -e .` (or `pip install .`) where a C++20 compiler is on PATH"
_REGISTERED: list[torch.library.Library] = []
"""Registrations hold as long as these objects live."""


@lru_cache(maxsize=1)
def unavailable_reason() -> str | None:
    """Loads specdec_kernels._C, which registers torch.ops.specdec.*. Returns why it is unavailable, or None."""
    try:
        importlib.import_module("specdec_kernels._C")
    except ModuleNotFoundError:
        return f"extension specdec_kernels._C not built; {REMEDY}"
    except ImportError as error:
        return f"extension specdec_kernels._C does not load ({error}); {REMEDY}"
    meta_kernels.register_fakes()
    if torch.cuda.is_available():
        _load_cuda()  # first, so that CUDA C++ keeps the operators that it serves
        if importlib.util.find_spec("triton") is not None:
            _REGISTERED.append(torch_ops.register_launches())
    return None


@lru_cache(maxsize=1)
def cuda_unavailable_reason() -> str | None:
    """Loads specdec_kernels._C_cuda. Returns why it is unavailable, or None."""
    return gpu_unavailable_reason() or unavailable_reason() or _load_cuda()  # schemas live in _C


@lru_cache(maxsize=1)
def _load_cuda() -> str | None:
    try:
        importlib.import_module("specdec_kernels._C_cuda")
    except ModuleNotFoundError:
        return (
            "extension specdec_kernels._C_cuda not built; run `SPECDEC_BUILD=cuda pip install -e .` with nvcc on PATH"
        )
    except ImportError as error:
        return f"extension specdec_kernels._C_cuda does not load ({error})"
    return None


def _require_device(kind: str, why_not: Callable[..., str | None] | None) -> Callable[..., str | None]:
    def check(*args: Any, **kwargs: Any) -> str | None:
        return why_not_on_device(kind, (*args, *kwargs.values())) or (why_not(*args, **kwargs) if why_not else None)

    return check


def cpu_backend(
    load: Callable[[], Callable[..., Any]],
    why_not: Callable[..., str | None] | None = None,
    name: str = "cpu",
    op: str | None = None,
) -> Backend:
    """Returns a backend that runs in the CPU extension, for tensors on the CPU.

    Args:
        load: Returns the callable.
        why_not: Returns why the backend cannot serve a call, or None.
        name: Name of the backend.
        op: Name of its operator in torch.ops.specdec. An extension built from older sources may lack it.

    Returns:
        The backend.
    """

    def find_missing_operator() -> str | None:
        reason = unavailable_reason()
        if reason is None and op is not None and not hasattr(torch.ops.specdec, op):
            return f"extension specdec_kernels._C is older than operator {op}; {REMEDY}"
        return reason

    # the same call serves tensors on a GPU if a Triton kernel is registered
    graph = {"cpu": name} | ({"cuda": "triton"} if op in torch_ops.LAUNCHES else {})
    return Backend(name, load, _require_device("cpu", why_not), find_missing_operator, graph_devices=graph)


def cuda_backend(
    load: Callable[[], Callable[..., Any]],
    why_not: Callable[..., str | None] | None = None,
    name: str = "cuda",
) -> Backend:
    """Returns a backend that runs in the CUDA extension, for tensors on a GPU."""
    return Backend(name, load, _require_device("cuda", why_not), cuda_unavailable_reason, graph_devices={"cuda": name})
