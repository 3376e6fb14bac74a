"""True results of launches that did not run: what the CPU backend of the operator says on the same numbers."""

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
    """Returns arguments with the CPU tensors of device tensors: same memory, other device."""
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


def fill(gpu: Gpu, found: Any, answer: Callable[[], Any]) -> None:
    """Writes the answer into the results of a launch: now, and whenever the graph that it went into is replayed."""
    places = [inner_of(each) for each in tensors_in(found)]

    def work() -> None:
        for place, value in zip(places, tensors_in(answer()), strict=True):
            if place.data_ptr() != value.data_ptr():
                _write(place, value)

    gpu.do(gpu.current, work)


def _write(place: torch.Tensor, value: torch.Tensor) -> None:
    """Copies a result; one with fewer columns, as a reference may have, leaves zeros in the rest."""
    if place.shape != value.shape:
        place.zero_()
        place = place[..., : value.shape[-1]]
    place.copy_(value)


def dispatched(mode: Operators, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operator under torch.ops.specdec, launched as the dispatcher's CUDA key launches it."""
    inputs, options = on_host(args), on_host(kwargs)
    device = _device((args, kwargs))
    if device is None:
        return func(*args, **kwargs)
    with torch._C._EnableTorchFunction(), Methods(mode.gpu), mode, torch.cuda.device(device):
        found = LAUNCHES[name](*args, **kwargs)
        fill(mode.gpu, found, lambda: func(*inputs, **options))
    return found


def _device(value: Any) -> torch.device | None:
    return next((each.device for each in tensors_in(value) if isinstance(each, DeviceTensor)), None)


def answering(gpu: Gpu, op: Op, launch: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a launch whose results are true."""

    @wraps(launch)
    def run(*args: Any, **kwargs: Any) -> Any:
        found = launch(*args, **kwargs)
        plain = {name: each for name, each in kwargs.items() if name not in ("out", "workspace")}
        inputs, options = on_host(args), on_host(plain)
        device = _device((args, kwargs))
        with torch.cuda.device(device):
            fill(gpu, found, lambda: _answer(op, inputs, options))
        return found

    return run


def _answer(op: Op, args: Any, kwargs: dict[str, Any]) -> Any:
    served = op.last_backend
    try:
        with use_backend(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)  # the reference's answer is as good
            return op(*args, **kwargs)
    finally:
        op.last_backend = served


@lru_cache(maxsize=1)
def _caches() -> list[Any]:
    """Answers about devices that are remembered."""
    from ..ops.tree_attention import launch

    return [
        launch._num_processors,
        launch._shared_memory,
        triton_backend.unavailable_reason,
        extension.cuda_unavailable_reason,
    ]


@contextmanager
def installed(gpu: Gpu, answers: bool) -> Iterator[None]:
    """Operators answer for launches, for the duration of the block."""
    extension.unavailable_reason()  # registers what the CPU has, before there seems to be a GPU
    former = {op: list(op.backends) for op in OPS.values()}
    for cache in _caches():
        cache.cache_clear()
    for op, backends in former.items():
        if answers:
            op.backends = [
                replace(each, load=_loading(gpu, op, each.load)) if each.name == "triton" else each for each in backends
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
    return lambda: answering(gpu, op, load())
