"""replay_verify: replay_sample at the nodes that the walk of tree_verify comes to, and at no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..dispatch import Op
from ..extension import cpu_backend
from .reference import replay_verify as _reference

__all__ = ["replay_verify"]


def _load_cpu() -> Callable[..., Any]:
    from .cpu_kernel import replay_verify

    return replay_verify


replay_verify = Op("replay_verify", _reference, [cpu_backend(_load_cpu, op="replay_verify")], direct=())
