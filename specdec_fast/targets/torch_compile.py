"""The forward pass of a target through torch.compile. Tests: tests/targets/test_torch_compile.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import torch

from specdec_kernels.dispatch.torch_ops import share_attention_plans

__all__ = ["compile_forward"]

_NUMBERS = count()
# Elements of a loop per thread. A fourth of it, torch's default, splits loops of a microsecond over the nodes of one
# row. Prompts take as long with either.
_GRAIN = 2048


def _keep_argument_guards(guards: Sequence[Any]) -> list[bool]:
    """Keeps the guards on arguments and torch's modes. Hundreds of guards on the unchanging model are dropped."""
    return [not guard.name or guard.name.removeprefix("L['").startswith("arguments") for guard in guards]


def compile_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a forward pass with torch.compile.

    The compiler caches by code object, which all models of a class share. Here every target has its own code object, so
    a target and its draft model need no guards on the model.

    Args:
        forward: A function of keyword arguments.

    Returns:
        The compiled function.
    """

    def run(**arguments: Any) -> Any:
        return forward(**arguments)

    run.__code__ = run.__code__.replace(co_name=f"forward_{next(_NUMBERS)}")
    options: dict[str, Any] = {
        "guard_filter_fn": _keep_argument_guards,
        "cpp.min_chunk_size": _GRAIN,
        "size_asserts": False,  # they would check every input and output in every pass
    }
    program = torch.compile(run, dynamic=None, options=options)

    def forward_once(**arguments: Any) -> Any:
        with share_attention_plans():  # layers share an attention plan
            return program(**arguments)

    return forward_once
