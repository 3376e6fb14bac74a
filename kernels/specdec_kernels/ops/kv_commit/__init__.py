"""kv_commit, kv_commit_scratch, kv_commit_pages: commits of accepted nodes in all layers of a paged cache."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor

from ...dispatch.extension import cpu_backend, cuda_backend
from ...dispatch.operator import Op, first_tensor_key
from ...triton_shared.triton_backend import INTERPRETED, triton_backend
from . import reference
from .cache_table import CacheTable


def _load(
    name: str,
) -> Callable[[], Callable[..., Any]]:  # one operator: the dispatcher selects CPU or CUDA by its tensors
    def load() -> Callable[..., Any]:
        if name == "kv_commit_scratch":
            from . import scratch_cpu_kernel

            return scratch_cpu_kernel.kv_commit_scratch
        from . import cpu_kernel

        return getattr(cpu_kernel, name)

    return load


def _load_triton(name: str) -> Callable[[], Callable[..., Any]]:
    def load() -> Callable[..., Any]:
        from . import launch

        return getattr(launch, name)

    return load


def _why_not_list(caches: Any, *args: Any, **kwargs: Any) -> str | None:
    if not isinstance(caches, CacheTable):
        return "a list of caches; a CacheTable made from it once keeps its addresses on the device"
    return None


def _key(caches: Any, *args: Any, **kwargs: Any) -> Hashable:
    table = next(each for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
    return True if table.is_cpu and not INTERPRETED else (table.device, isinstance(caches, CacheTable))


def _make_op(
    name: str, key: Callable[..., Hashable], why_not: Callable[..., str | None] | None, check_data: Callable[..., None]
) -> Op:
    triton = triton_backend(_load_triton(name), why_not)
    backends = [cuda_backend(_load(name)), triton, cpu_backend(_load(name), op="kv_commit_pages")]
    return Op(name, getattr(reference, name), backends, key=key, check_data=check_data)


kv_commit = _make_op("kv_commit", _key, _why_not_list, reference.check_in_place_data)
kv_commit_scratch = _make_op("kv_commit_scratch", _key, _why_not_list, reference.check_scratch_data)
kv_commit_pages = _make_op("kv_commit_pages", first_tensor_key, None, reference.check_pages_data)

__all__ = ["CacheTable", "kv_commit", "kv_commit_pages", "kv_commit_scratch"]
