"""The forward pass of a target through torch.compile. Tests: tests/targets/test_torch_compile.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import torch

from specdec_kernels.dispatch.torch_ops import share_attention_plans

__all__ = ["compiled"]

_NUMBERS = count()
# Elements of a loop that a thread is worth starting for, by the pass that was compiled. A fourth of it, torch's own
# grain, splits loops of a microsecond over the nodes of one row. Prompts take as long with either.
_GRAIN = 2048


def _of_arguments(guards: Sequence[Any]) -> list[bool]:
    """Which conditions of a compiled pass are looked at before each pass: those on its arguments and on torch's modes,
    not the hundreds on the model, which is the target's own and stays as it is."""
    return [not guard.name or guard.name.removeprefix("L['").startswith("arguments") for guard in guards]


def compiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` through torch.compile, for keyword arguments.

    The compiler keeps what it made by code object, and all models of a class share one: here every target has its own,
    so the passes of a target and of its draft model are not told apart by conditions on the model.
    """

    def run(**arguments: Any) -> Any:
        return forward(**arguments)

    run.__code__ = run.__code__.replace(co_name=f"forward_{next(_NUMBERS)}")
    options: dict[str, Any] = {
        "guard_filter_fn": _of_arguments,
        "cpp.min_chunk_size": _GRAIN,
        "size_asserts": False,  # of every input and every operator's output, before every pass
    }
    program = torch.compile(run, dynamic=None, options=options)

    def forward_once(**arguments: Any) -> Any:
        with share_attention_plans():  # the layers share a plan of their attention
            return program(**arguments)

    return forward_once
