"""kv_stage: writes new keys and values into their slots of a paged cache."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor

from ...dispatch.extension import cpu_backend, cuda_backend
from ...dispatch.operator import Op, lazy_import
from ...triton_shared.triton_backend import INTERPRETED, triton_backend
from .reference import check_arguments
from .reference import kv_stage as _reference


def _why_not_triton(*args: Any, **kwargs: Any) -> str | None:
    from .launch import why_not

    return why_not(*args, **kwargs)


def _key(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> Hashable:
    if key.is_cpu and not INTERPRETED:
        return key.dtype
    return key.device, key.dtype, key_cache.shape[2:] == value_cache.shape[2:]


# C++ and CUDA share one torch operator: the dispatcher selects the device by its tensors.
_compiled = lazy_import(__name__, "cpu_kernel:kv_stage")
kv_stage = Op(
    "kv_stage",
    _reference,
    [
        cuda_backend(_compiled),
        triton_backend(lazy_import(__name__, "launch:kv_stage"), _why_not_triton),
        cpu_backend(_compiled, op="kv_stage"),
    ],
    key=_key,
    check_data=check_arguments,
)

__all__ = ["kv_stage"]
