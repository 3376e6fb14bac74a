"""Where the tensors of a call lie, and that GPU as the current one while a launch runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch


def first_tensor(args: Iterable[Any]) -> torch.Tensor | None:
    """The first tensor among the arguments; lists and laws are looked into."""
    for argument in args:
        if isinstance(argument, (list, tuple)) and argument:
            argument = argument[0]
        if isinstance(argument, torch.Tensor):
            return argument
    return None


def on_device(kind: str, args: Iterable[Any]) -> str | None:
    """None if the first tensor among the arguments lies on a device of this kind, or if there is none."""
    tensor = first_tensor(args)
    return None if tensor is None or tensor.device.type == kind else f"tensors are on {tensor.device.type}"


def on_own_device(launch: Callable[..., Any]) -> Callable[..., Any]:
    """The launch with the GPU of its tensors as the current one: Triton launches there, whatever it is given.

    The launch itself where there is one GPU, or none.
    """
    if torch.cuda.device_count() < 2:
        return launch

    @wraps(launch)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.cuda.device_of(first_tensor(args or kwargs.values())):
            return launch(*args, **kwargs)

    return run
