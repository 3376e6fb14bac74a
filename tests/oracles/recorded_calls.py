"""Recording the arguments of operators of torch.ops.specdec."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


def calls_of(name: str, run: Callable[[], Any]) -> list[tuple[Any, ...]]:
    """Runs `run` and returns the positional arguments of every call of torch.ops.specdec.<name>."""
    found: list[tuple[Any, ...]] = []

    class Listen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func._schema.name == f"specdec::{name}":
                found.append(args)
            return func(*args, **(kwargs or {}))

    with Listen():
        run()
    return found
