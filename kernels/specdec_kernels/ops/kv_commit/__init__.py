"""kv_commit, kv_commit_scratch, kv_commit_pages: commits of accepted nodes in all layers of a paged cache."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor

from ...dispatch.extension import cpu_backend, cuda_backend
from ...dispatch.operator import Op, first_tensor_key, lazy_import
from ...triton_shared.triton_backend import INTERPRETED, triton_backend
from . import reference
from .cache_table import CacheTable


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
    # C++ and CUDA share one torch operator: the dispatcher selects the device by its tensors.
    compiled = lazy_import(__name__, f"{'scratch_cpu_kernel' if name == 'kv_commit_scratch' else 'cpu_kernel'}:{name}")
    triton = triton_backend(lazy_import(__name__, f"launch:{name}"), why_not)
    backends = [cuda_backend(compiled), triton, cpu_backend(compiled, op="kv_commit_pages")]
    return Op(name, getattr(reference, name), backends, key=key, check_data=check_data)


kv_commit = _make_op("kv_commit", _key, _why_not_list, reference.check_in_place_data)
kv_commit_scratch = _make_op("kv_commit_scratch", _key, _why_not_list, reference.check_scratch_data)
kv_commit_pages = _make_op("kv_commit_pages", first_tensor_key, None, reference.check_pages_data)

__all__ = ["CacheTable", "kv_commit", "kv_commit_pages", "kv_commit_scratch"]
