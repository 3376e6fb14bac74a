"""Devices of a call's tensors, and what the GPU there supports.

Tests: tests/launch/test_devices.py, tests/launch/test_devices_refused.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, wraps
from itertools import chain
from typing import Any

import torch

MIN_CAPABILITY = (8, 0)
"""Lowest compute capability that the kernels are compiled for."""
MIN_SHARED_MEMORY = 65_536
"""Bytes of shared memory that a program may take. Tree attention takes more and checks the device itself."""


def gpu_unavailable_reason() -> str | None:
    """Returns why there is no CUDA device and what happens instead, or None if there is one."""
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None and torch.version.hip is None:
        return f"no CUDA device: torch {torch.__version__} is built without CUDA; operators run on the CPU"
    reason = "torch sees none"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # torch says whether the driver is missing or too old
        reason = str(error).strip().partition("\n")[0].partition(". ")[0].rstrip(".")
    built = f"CUDA {torch.version.cuda}" if torch.version.hip is None else f"ROCm {torch.version.hip}"
    return f"no CUDA device: {reason} (torch is built for {built}); operators run on the CPU"


def unsupported_gpu_reason(device: torch.device) -> str | None:
    """Returns why compiled kernels cannot run on this GPU, or None if they can. Other devices give None."""
    if device.type != "cuda":
        return None
    found = torch.cuda.get_device_properties(device)
    if (found.major, found.minor) < MIN_CAPABILITY:
        needed = ".".join(map(str, MIN_CAPABILITY))
        got = f"{found.major}.{found.minor}"
        return f"{device} ({found.name}) has compute capability {got}; expected {needed} or later"
    shared = getattr(found, "shared_memory_per_block_optin", MIN_SHARED_MEMORY)
    if shared < MIN_SHARED_MEMORY:
        words = f"{device} ({found.name}) gives a program {shared} bytes of shared memory"
        return f"{words}; expected at least {MIN_SHARED_MEMORY}"
    return None


def find_first_tensor(args: Iterable[Any]) -> torch.Tensor | None:
    """Returns the first tensor among the arguments, also as first element of a list or a distribution."""
    for argument in args:
        if isinstance(argument, (list, tuple)) and argument:
            argument = argument[0]
        if isinstance(argument, torch.Tensor):
            return argument
    return None


def why_not_on_device(kind: str, args: Iterable[Any]) -> str | None:
    """Returns why kernels for a kind of device cannot serve these arguments, or None.

    Args:
        kind: "cpu" or "cuda".
        args: Arguments of a call. Its first tensor decides; a call without tensors gives None.
    """
    tensor = find_first_tensor(args)
    if tensor is None:
        return None
    return (
        unsupported_gpu_reason(tensor.device) if tensor.device.type == kind else f"tensors are on {tensor.device.type}"
    )


def check_one_device(op: str, named: Iterable[tuple[str, Any]]) -> None:
    """Checks that all tensors of a call are on one device, also those inside tuples and dataclasses.

    A kernel would read an address of another device. Caller-owned memory (out, workspace) is checked elsewhere.

    Args:
        op: Name of the operator, for the message.
        named: Names and values of the arguments.

    Raises:
        ValueError: If tensors are on several devices.
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
        for label, each in tensors:
            if not isinstance(each, torch.Tensor) or name in ("out", "workspace"):
                continue
            if first is None:
                first, like = each.device, label
            elif each.device != first:
                raise ValueError(
                    f"{op}: {label} is on {each.device}; expected {first} like {like}; put all on one device with "
                    f'.to("...")'
                )


@cache
def require_one_device(launch: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a launch refuse tensors on several devices.

    The kernels themselves run on the GPU of their tensors (`triton_shared/device_guard.py`).

    Args:
        launch: Function of an operator's `launch.py`.

    Returns:
        The launch, which raises ValueError if its tensors are on several devices.
    """
    names, op = launch.__code__.co_varnames, launch.__name__

    @wraps(launch)
    def run(*args: Any, **kwargs: Any) -> Any:
        check_one_device(op, chain(zip(names, args), kwargs.items()))
        return launch(*args, **kwargs)

    return run
