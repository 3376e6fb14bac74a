"""True results of simulated launches: the CPU backend of the operator computes them from the same numbers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from functools import lru_cache, wraps
from typing import Any

import torch

from ..dispatch import extension
from ..dispatch.backend_request import use_backend
from ..dispatch.operator import FallbackWarning, Op
from ..dispatch.registry import OPS
from ..dispatch.torch_ops import LAUNCHES
from ..ops.kv_commit import CacheTable
from ..testing.agreement import tensors_in
from ..triton_shared import triton_backend
from .methods import Methods
from .state import Gpu
from .tensors import DeviceTensor, Operators, inner_of


def on_host(value: Any) -> Any:
    """Returns the arguments with device tensors replaced by their CPU tensors, which share the memory."""
    if isinstance(value, torch.Tensor):
        return inner_of(value)
    if isinstance(value, CacheTable):
        return _table(value)
    if isinstance(value, (tuple, list)):
        parts = [on_host(each) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, dict):
        return {name: on_host(each) for name, each in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(**{each.name: on_host(getattr(value, each.name)) for each in fields(value)})
    return value


def _table(value: CacheTable) -> CacheTable:
    return CacheTable([inner_of(each) for each in value])


def write_results(gpu: Gpu, results: Any, compute: Callable[[], Any]) -> None:
    """Writes computed values to the results of a launch, now and at every replay of the graph that captures it."""
    targets = [inner_of(each) for each in tensors_in(results)]

    def work() -> None:
        for target, value in zip(targets, tensors_in(compute()), strict=True):
            if target.data_ptr() != value.data_ptr():
                _write(target, value)

    gpu.do(gpu.current, work)


def _write(target: torch.Tensor, value: torch.Tensor) -> None:
    """Copies a result. A reference may return fewer columns; the others become zero."""
    if target.shape != value.shape:
        target.zero_()
        target = target[..., : value.shape[-1]]
    target.copy_(value)


def run_dispatched(mode: Operators, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """Runs an operator of torch.ops.specdec as the dispatcher's CUDA key does, and returns its true results."""
    inputs, options = on_host(args), on_host(kwargs)
    device = _device((args, kwargs))
    if device is None:
        return func(*args, **kwargs)
    with torch._C._EnableTorchFunction(), Methods(mode.gpu), mode, torch.cuda.device(device):
        results = LAUNCHES[name](*args, **kwargs)
        write_results(mode.gpu, results, lambda: func(*inputs, **options))
    return results


def _device(value: Any) -> torch.device | None:
    return next((each.device for each in tensors_in(value) if isinstance(each, DeviceTensor)), None)


def with_true_results(gpu: Gpu, op: Op, launch: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the launch followed by the true results of its operator."""

    @wraps(launch)
    def run(*args: Any, **kwargs: Any) -> Any:
        results = launch(*args, **kwargs)
        plain = {name: each for name, each in kwargs.items() if name not in ("out", "workspace")}
        inputs, options = on_host(args), on_host(plain)
        device = _device((args, kwargs))
        with torch.cuda.device(device):
            write_results(gpu, results, lambda: _true_results(op, inputs, options))
        return results

    return run


def _true_results(op: Op, args: Any, kwargs: dict[str, Any]) -> Any:
    """Returns the results of an operator on CPU tensors, and leaves `last_backend` unchanged."""
    last_backend = op.last_backend
    try:
        with use_backend(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)  # the reference gives the same results
            return op(*args, **kwargs)
    finally:
        op.last_backend = last_backend


@lru_cache(maxsize=1)
def _caches() -> list[Any]:
    """Returns the cached functions whose results depend on the device."""
    from ..ops.tree_attention import launch

    return [
        launch._num_processors,
        launch._shared_memory,
        triton_backend.unavailable_reason,
        extension.cuda_unavailable_reason,
    ]


@contextmanager
def installed(gpu: Gpu, true_results: bool) -> Iterator[None]:
    """Lets operators write true results after launches, for the duration of the block.

    Args:
        gpu: The simulated GPUs.
        true_results: Whether to do so. If not, only cached choices are cleared.

    Yields:
        Nothing.
    """
    extension.unavailable_reason()  # registers the CPU operators before a GPU seems to be present
    former = {op: list(op.backends) for op in OPS.values()}
    for cache in _caches():
        cache.cache_clear()
    for op, backends in former.items():
        if true_results:
            op.backends = [
                replace(each, load=_loading(gpu, op, each.load)) if each.name.startswith("triton") else each
                for each in backends
            ]
        op.clear_choices()
    try:
        yield
    finally:
        for op, backends in former.items():
            op.backends = backends
            op.clear_choices()
        for cache in _caches():
            cache.cache_clear()


def _loading(gpu: Gpu, op: Op, load: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: with_true_results(gpu, op, load())
