"""Tensor methods that would not reach an operator on a simulated GPU: torch first takes a guard of a real device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

from .state import Gpu
from .tensors import DeviceTensor, Operators, inner_of, mapped

READERS = frozenset(("item", "tolist", "numpy", "__int__", "__bool__", "__float__", "__index__", "__array__"))
"""Tensor methods that copy numbers to the host."""
GUARDED: dict[str, Any] = {
    "contiguous": torch.ops.aten.contiguous.default,
    "copy_": torch.ops.aten.copy_.default,
    "__invert__": torch.ops.aten.bitwise_not.default,
    "nonzero": torch.ops.aten.nonzero.default,
}
"""Tensor methods that take a device guard before they call their operator, and that operator."""


class Methods(TorchFunctionMode):
    """Redirects tensor methods that take a device guard, and simulates pinned memory."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__":  # an attribute, such as a shape: most calls, and no work on the device
            return func(*args)
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, DeviceTensor):
            if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
                return self._indexed(func, *args)
            if name in READERS:
                self._gpu.wait(name)
                return func(first.cpu_tensor, *args[1:], **kwargs)
            if name == "is_pinned":
                return False
            if name == "new_tensor":
                like = {"dtype": first.dtype, "device": first.device}
                return self._from_numbers(torch.tensor, args[1:], {**like, **kwargs})
            if name in GUARDED:
                return GUARDED[name](*args, **kwargs)
        if name == "cuda" and isinstance(first, torch.Tensor):
            device = args[1] if len(args) > 1 else kwargs.get("device")
            return first.to(torch.device("cuda", self._gpu.index(device)))
        if name == "to" or "device" in kwargs:  # torch would query the current device of a real GPU
            args, kwargs = mapped(self._indexed_device, args), mapped(self._indexed_device, kwargs)
        if func in (torch.tensor, torch.as_tensor):
            return self._from_numbers(func, args, kwargs)
        if name == "pin_memory" and isinstance(first, torch.Tensor):
            return self._gpu.pin(first.clone())
        if name == "is_pinned" and isinstance(first, torch.Tensor):
            return self._gpu.is_pinned(first)
        if kwargs.get("pin_memory"):
            return self._gpu.pin(func(*args, **{**kwargs, "pin_memory": False}))
        return func(*args, **kwargs)

    def _indexed_device(self, value: Any) -> Any:
        """Returns the device "cuda" with the index of the current one, and anything else as it is."""
        named = isinstance(value, str) and value == "cuda"
        if named or (isinstance(value, torch.device) and value.type == "cuda" and value.index is None):
            return torch.device("cuda", self._gpu.current)
        return value

    def _from_numbers(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Creates a tensor from host numbers on the CPU. A target device receives a pageable copy."""
        kwargs = dict(kwargs)
        device, pinned = kwargs.pop("device", None), kwargs.pop("pin_memory", False)
        if device is None and isinstance(args[0], torch.Tensor):
            return func(*args, **kwargs)
        made = func(*args, **kwargs)
        if pinned:
            self._gpu.pin(made)
        return made if device is None else made.to(device)

    def _indexed(self, func: Any, tensor: DeviceTensor, index: Any, *value: Any) -> Any:
        """Runs x[index] or x[index] = value on the CPU tensors."""
        gpu = self._gpu
        for each in index if isinstance(index, tuple) else (index,):
            if isinstance(each, DeviceTensor) and each.dtype in (torch.bool, torch.uint8):
                gpu.wait("indexing by a mask")
            elif isinstance(each, DeviceTensor) and each.dim() == 0:
                gpu.wait("indexing by a number of the device")
            elif isinstance(each, torch.Tensor) and not isinstance(each, DeviceTensor) and each.dim():
                gpu.upload("indexing by indices on the CPU", each, False)
            elif isinstance(each, list):
                gpu.upload("indexing by a list", torch.tensor(each), False)
        if value and isinstance(value[0], torch.Tensor) and not isinstance(value[0], DeviceTensor) and value[0].dim():
            gpu.upload("assignment from the CPU", value[0], False)
        gpu.acting.append(tensor.device)
        try:
            with torch.inference_mode(False), torch.no_grad():
                found = func(tensor.cpu_tensor, mapped(inner_of, index), *map(inner_of, value))
        finally:
            gpu.acting.pop()
        with torch.inference_mode(False):
            return DeviceTensor(found, tensor.device, gpu) if isinstance(found, torch.Tensor) else found


@contextmanager
def installed(gpu: Gpu, own: Callable[..., Any]) -> Iterator[None]:
    """Installs the tensors of simulated GPUs for the duration of the block.

    Args:
        gpu: The simulated GPUs.
        own: Runs the operators of torch.ops.specdec; see `launch_results.run_dispatched`.

    Yields:
        Nothing.
    """
    overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    mode = Operators(gpu, own)
    try:
        with patch.object(DeviceTensor, "__torch_dispatch__", _dispatch_to(mode)), torch.no_grad(), Methods(gpu), mode:
            yield  # without gradients: autograd would use a real GPU
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(overwrites)


def _dispatch_to(mode: Operators) -> Any:
    """Returns a dispatch method for threads in which the modes are not active."""

    def dispatch(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return mode.__torch_dispatch__(func, types, args, kwargs)

    return classmethod(dispatch)
