"""Where the tensors of a call lie, and what the GPU there is capable of."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, wraps
from itertools import chain
from typing import Any

import torch

MIN_CAPABILITY = (8, 0)
"""Compute capability that the kernels are compiled for at least."""
MIN_SHARED_MEMORY = 65_536
"""Bytes of shared memory that a program may take. Tree attention takes more and looks at the device itself."""


def gpu_unavailable_reason() -> str | None:
    """Returns why there is no CUDA device, and what happens instead; None where there is one."""
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None and torch.version.hip is None:
        return f"no CUDA device: torch {torch.__version__} is built without CUDA; operators run on the CPU"
    reason = "torch sees none"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # a driver that is missing or too old, in torch's words
        reason = str(error).strip().partition("\n")[0].partition(". ")[0].rstrip(".")
    built = f"CUDA {torch.version.cuda}" if torch.version.hip is None else f"ROCm {torch.version.hip}"
    return f"no CUDA device: {reason} (torch is built for {built}); operators run on the CPU"


def unsupported_gpu_reason(device: torch.device) -> str | None:
    """Returns why compiled kernels cannot run on a GPU, or None where they can and for other kinds of device."""
    if device.type != "cuda":
        return None
    found = torch.cuda.get_device_properties(device)
    if (found.major, found.minor) < MIN_CAPABILITY:
        needed = ".".join(map(str, MIN_CAPABILITY))
        got = f"{found.major}.{found.minor}"
        return f"{device} ({found.name}) has compute capability {got}; needed is {needed} or later"
    shared = getattr(found, "shared_memory_per_block_optin", MIN_SHARED_MEMORY)
    if shared < MIN_SHARED_MEMORY:
        return (
            f"{device} ({found.name}) gives a program {shared} bytes of shared memory; needed are {MIN_SHARED_MEMORY}"
        )
    return None


def find_first_tensor(args: Iterable[Any]) -> torch.Tensor | None:
    """The first tensor among the arguments; lists and distributions are looked into."""
    for argument in args:
        if isinstance(argument, (list, tuple)) and argument:
            argument = argument[0]
        if isinstance(argument, torch.Tensor):
            return argument
    return None


def why_not_on_device(kind: str, args: Iterable[Any]) -> str | None:
    """Returns None if the first tensor among the arguments lies on a device of this kind on which kernels can run, or
    if there is none; else the reason.
    """
    tensor = find_first_tensor(args)
    if tensor is None:
        return None
    return (
        unsupported_gpu_reason(tensor.device) if tensor.device.type == kind else f"tensors are on {tensor.device.type}"
    )


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
                    f"{op}: {called} lies on {each.device}; expected {first} like {like}; put all on one device with "
                    f'.to("...")'
                )


@cache
def require_one_device(launch: Callable[..., Any]) -> Callable[..., Any]:
    """A launch that refuses tensors of several devices.

    The kernels themselves run on the GPU of their tensors (`device_triton.py`).

    Args:
        launch: Function of an operator's `launch.py`.

    Returns:
        The launch. It raises ValueError where its tensors lie on several devices.
    """
    names, op = launch.__code__.co_varnames, launch.__name__

    @wraps(launch)
    def run(*args: Any, **kwargs: Any) -> Any:
        check_one_device(op, chain(zip(names, args), kwargs.items()))
        return launch(*args, **kwargs)

    return run
