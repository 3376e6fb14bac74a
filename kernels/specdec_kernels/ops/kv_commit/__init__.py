"""Commits of accepted nodes in all layers of a cache: in place, out of a scratch, or of page ids alone."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor

from ...dispatch.extension import cpu_backend, cuda_backend
from ...dispatch.operator import Op, first_tensor_key
from ...triton_shared.triton_backend import INTERPRETED, triton_backend
from . import reference
from .cache_table import CacheTable


def _load(name: str) -> Callable[[], Callable[..., Any]]:  # the operator itself tells CPU from CUDA by its tensors
    def load() -> Callable[..., Any]:
        if name == "kv_commit_scratch":
            from . import scratch_kernel

            return scratch_kernel.kv_commit_scratch
        from . import cpu_kernel

        return getattr(cpu_kernel, name)

    return load


def _load_triton(name: str) -> Callable[[], Callable[..., Any]]:
    def load() -> Callable[..., Any]:
        from . import launch

        return getattr(launch, name)

    return load


def _no_list(caches: Any, *args: Any, **kwargs: Any) -> str | None:
    if not isinstance(caches, CacheTable):
        return "a list of caches; a CacheTable made from it once keeps its addresses on the device"
    return None


def _key(caches: Any, *args: Any, **kwargs: Any) -> Hashable:
    table = next(each for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
    return True if table.is_cpu and not INTERPRETED else (table.device, isinstance(caches, CacheTable))


def _op(
    name: str, key: Callable[..., Hashable], why_not: Callable[..., str | None] | None, look: Callable[..., None]
) -> Op:
    triton = triton_backend(_load_triton(name), why_not)
    backends = [cuda_backend(_load(name)), triton, cpu_backend(_load(name), op="kv_commit_pages")]
    return Op(name, getattr(reference, name), backends, key=key, check_data=look)


kv_commit = _op("kv_commit", _key, _no_list, reference.look_in_place)
kv_commit_scratch = _op("kv_commit_scratch", _key, _no_list, reference.look_scratch)
kv_commit_pages = _op("kv_commit_pages", first_tensor_key, None, reference.look_pages)

__all__ = ["CacheTable", "kv_commit", "kv_commit_pages", "kv_commit_scratch"]
