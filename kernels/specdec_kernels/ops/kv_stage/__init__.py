"""kv_stage: writes new keys and values into their slots of a paged cache."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor

from ...dispatch.extension import cpu_backend, cuda_backend
from ...dispatch.operator import Op
from ...triton_shared.triton_backend import INTERPRETED, triton_backend
from .reference import check_arguments
from .reference import kv_stage as _reference


def _load() -> Callable[..., Any]:  # one operator: the dispatcher selects CPU or CUDA by its tensors
    from .cpu_kernel import kv_stage

    return kv_stage


def _load_triton() -> Callable[..., Any]:
    from .launch import kv_stage

    return kv_stage


def _why_not_triton(*args: Any, **kwargs: Any) -> str | None:
    from .launch import why_not

    return why_not(*args, **kwargs)


def _key(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> Hashable:
    if key.is_cpu and not INTERPRETED:
        return key.dtype
    return key.device, key.dtype, key_cache.shape[2:] == value_cache.shape[2:]


kv_stage = Op(
    "kv_stage",
    _reference,
    [cuda_backend(_load), triton_backend(_load_triton, _why_not_triton), cpu_backend(_load, op="kv_stage")],
    key=_key,
    check_data=check_arguments,
)

__all__ = ["kv_stage"]
