"""Where the tensors of a call lie: on one device, and that GPU is the current one while a launch runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, wraps
from itertools import chain
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


def check_one_device(op: str, named: Iterable[tuple[str, Any]]) -> None:
    """Raises ValueError where tensors among the arguments, in tuples and in dataclasses lie on several devices.

    A kernel would follow an address of another device. Memory of the caller's (out, workspace) is checked elsewhere.
    """
    first = like = None
    for name, value in named:
        if isinstance(value, torch.Tensor):
            tensors: Iterable[tuple[str, Any]] = ((name, value),)
        elif isinstance(value, (tuple, list)):
            tensors = [(f"{name}[{place}]", each) for place, each in enumerate(value)]
        elif hasattr(value, "__dataclass_fields__"):
            tensors = [(f"{name}.{field}", getattr(value, field)) for field in value.__dataclass_fields__]
        else:
            continue
        for called, each in tensors:
            if not isinstance(each, torch.Tensor) or name in ("out", "workspace"):
                continue
            if first is None:
                first, like = each.device, called
            elif each.device != first:
                raise ValueError(
                    f"{op}: {called} lies on {each.device}; expected {first} like {like}; move it with .to({first})"
                )


@cache
def on_own_device(launch: Callable[..., Any]) -> Callable[..., Any]:
    """The launch, on the GPU of its tensors as the current one: Triton launches there, whatever it is given. Raises
    ValueError for tensors of several devices.
    """
    names, op, several = launch.__code__.co_varnames, launch.__name__, torch.cuda.device_count() > 1

    @wraps(launch)
    def run(*args: Any, **kwargs: Any) -> Any:
        check_one_device(op, chain(zip(names, args), kwargs.items()))
        if not several:
            return launch(*args, **kwargs)
        with torch.cuda.device_of(first_tensor(chain(args, kwargs.values()))):
            return launch(*args, **kwargs)

    return run
