"""Tensors of a simulated GPU: a CUDA device outside, and inside a CPU tensor with the numbers.

Every torch operator runs on the CPU tensors, and its results are on the same simulated device. Waits of the host and
copies from pageable memory are recorded. An operator on tensors of two devices raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .state import Gpu

READS = {"_local_scalar_dense", "equal", "is_nonzero"}
"""Operators that return a number to the host."""
SHAPES_OF_DATA = {"nonzero", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive", "bincount"}
"""Operators whose result shape depends on values on the device."""
WHOLE = {"scaled_dot_product_attention"}
"""Composite operators that are not decomposed, because their parts require kernels of the device."""
ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
"""Operators that allocate memory and write nothing to it."""
UNWRITTEN = 0xFF
"""Byte that marks unwritten memory: NaN as a float, -1 as an integer."""
MAX_MARKED = 2**22
"""Most bytes of an allocation that are marked as unwritten."""
TO_DEVICE = {"_to_copy", "copy_", "to"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}


class DeviceTensor(torch.Tensor):
    """A tensor on a simulated GPU."""

    cpu_tensor: torch.Tensor
    gpu: Gpu

    @staticmethod
    def __new__(cls, inner: torch.Tensor, device: torch.device, gpu: Gpu) -> DeviceTensor:
        """Wraps a CPU tensor: same shape, strides and dtype, on the given device."""
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=device, requires_grad=False,
        )  # fmt: skip
        made.cpu_tensor, made.gpu = inner, gpu
        return made

    def __init__(self, inner: torch.Tensor, device: torch.device, gpu: Gpu) -> None:
        pass

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise RuntimeError(
            "simulated_gpu: got a tensor outside of its block; expected a use inside; keep its values on the CPU"
        )

    def data_ptr(self) -> int:
        """Returns the address of the CPU tensor, which is aligned like GPU memory."""
        return self.cpu_tensor.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Returns the storage of the CPU tensor. Views of one tensor share it."""
        return self.cpu_tensor.untyped_storage()

    def __deepcopy__(self, memo: dict[int, Any]) -> DeviceTensor:
        copied = memo[id(self)] = DeviceTensor(self.cpu_tensor.clone(), self.device, self.gpu)
        return copied

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"DeviceTensor({self.cpu_tensor!r}, device={self.device})"


def inner_of(value: Any) -> Any:
    """Returns the CPU tensor of a device tensor, and any other value unchanged."""
    return value.cpu_tensor if isinstance(value, DeviceTensor) else value


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Applies `change` to every part of arguments or results, including those in lists, tuples and dicts."""
    if type(value) in (list, tuple):
        return type(value)([mapped(change, each) for each in value])
    if type(value) is dict:
        return {name: mapped(change, each) for name, each in value.items()}
    if isinstance(value, tuple):  # named results, such as those of torch.sort
        return type(value)([mapped(change, each) for each in value])
    return change(value)


class _Call:
    """Arguments of an operator with CPU tensors in place of device tensors, and the devices of these."""

    def __init__(self, args: Any, kwargs: dict[str, Any]) -> None:
        self.devices: list[torch.device] = []
        self.host: list[torch.Tensor] = []  # CPU tensors among the arguments, without scalars
        self.wrappers: dict[int, DeviceTensor] = {}
        self.args, self.kwargs = mapped(self._unwrap, args), mapped(self._unwrap, kwargs)

    def _unwrap(self, value: Any) -> Any:
        if isinstance(value, DeviceTensor):
            if value.device not in self.devices:
                self.devices.append(value.device)
            self.wrappers[id(value.cpu_tensor)] = value
            return value.cpu_tensor
        if isinstance(value, torch.Tensor) and value.dim():
            self.host.append(value)
        return value


def _on_gpu(device: Any) -> torch.device | None:
    """Returns the requested device if it is a GPU, else None."""
    if device is None:
        return None
    requested = torch.device(device)
    return requested if requested.type == "cuda" else None


def _names_gpu(args: Any, kwargs: dict[str, Any]) -> bool:
    """Returns whether a GPU is among the arguments as a device."""
    return any(isinstance(each, torch.device) and each.type == "cuda" for each in (*args, kwargs.get("device")))


@lru_cache(maxsize=4096)
def _is_composite(func: Any) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"))


class Operators(TorchDispatchMode):
    """Runs every torch operator that involves a simulated GPU."""

    def __init__(self, gpu: Gpu, own: Callable[..., Any]) -> None:
        super().__init__()
        self.gpu, self._own = gpu, own  # own: runs operators of torch.ops.specdec

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C._InferenceMode(False):  # a view of a normal tensor must be a normal tensor
            torch._C._set_grad_enabled(False)  # until the block ends, which restores both; no_grad() takes longer
            return self._serve(func, args, kwargs or {})

    def _serve(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name = func._schema.name.partition("::")[2]
        if func.namespace == "specdec":
            return self._own(self, func, name, args, kwargs)
        call = _Call(args, kwargs)
        acting = self.gpu.acting[-1] if self.gpu.acting else None
        if not call.devices and acting is None and not _names_gpu(args, kwargs):
            return self._on_host(func, name, args, kwargs)
        if func.namespace == "aten" and name not in WHOLE and _is_composite(func):
            with self:
                found = func.decompose(*args, **kwargs)
            if found is not NotImplemented:
                return found
        if acting is None and (name in TO_DEVICE or "device" in kwargs):
            return self._moved(func, name, call)
        device = call.devices[0] if call.devices else acting
        assert device is not None
        self._check_devices(name, call)
        if (name in READS or name in SHAPES_OF_DATA) and call.devices:
            self.gpu.wait(name)
        if name == "repeat_interleave" and call.kwargs.get("output_size") is None:
            self.gpu.wait("repeat_interleave without output_size")
        if name in INDEXING and call.devices:  # `Methods` handles x[...]
            self._record_indices(name, call)
        return self._run(func, name, call, device)

    def _on_host(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs an operator on the CPU alone. Pinned memory is simulated."""
        pinned = kwargs.get("pin_memory") or name in ("_pin_memory", "pin_memory")
        if name in ("_pin_memory", "pin_memory"):
            return self.gpu.pin(args[0].clone())
        if name == "is_pinned":
            return self.gpu.is_pinned(args[0])
        if pinned:
            return self.gpu.pin(func(*args, **{**kwargs, "pin_memory": False}))
        return func(*args, **kwargs)

    def _check_devices(self, name: str, call: _Call) -> None:
        """Raises RuntimeError for tensors on several devices, as torch does."""
        mixed = [*call.devices, *(["cpu"] if call.host and name not in INDEXING else [])]
        if len(mixed) > 1:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, {mixed[0]} and "
                f"{mixed[1]}! (when checking arguments of {name})"
            )

    def _record_indices(self, name: str, call: _Call) -> None:
        """Records a wait for every mask, whose result shape depends on data, and an upload for indices on the CPU."""
        for index in call.args[1]:
            if index is None:
                continue
            if index.dtype in (torch.bool, torch.uint8):
                self.gpu.wait(f"{name} by a mask")
            if any(index is each for each in call.host):
                self.gpu.upload(f"{name} by indices on the CPU", index, False)

    def _moved(self, func: Any, name: str, call: _Call) -> Any:
        """Runs operators that create tensors on a device, or copy between devices."""
        gpu = self.gpu
        source = call.args[1] if name == "copy_" else call.args[0] if call.args else None
        from_gpu = call.devices[-1] if call.devices and isinstance(source, torch.Tensor) else None
        target: torch.device | None
        if name == "copy_":
            to_gpu = id(call.args[0]) in call.wrappers
            target = call.wrappers[id(call.args[0])].device if to_gpu else None
            from_gpu = call.wrappers[id(source)].device if id(source) in call.wrappers else None
        elif call.kwargs.get("device") is not None:
            target = _on_gpu(call.kwargs["device"])
        else:
            target = from_gpu
        third = call.args[2] if name == "copy_" and len(call.args) > 2 else False
        non_blocking = bool(call.kwargs.get("non_blocking") or third)
        copies = name in TO_DEVICE
        if copies and isinstance(source, torch.Tensor):
            if target is not None and from_gpu is None:
                gpu.upload(name, source, non_blocking)
            elif target is None and from_gpu is not None:
                destination = call.args[0] if name == "copy_" else None
                if not (non_blocking and destination is not None and gpu.is_pinned(destination)):
                    gpu.wait(f"{name} to the CPU")
        for pinned in ("pin_memory", "non_blocking"):
            if call.kwargs.get(pinned) and name != "copy_":
                call.kwargs[pinned] = False
        if "device" in call.kwargs:
            call.kwargs["device"] = torch.device("cpu")
        if target is None:
            device = from_gpu
            if device is not None and name == "copy_":  # to host memory, also at every replay of a graph
                target_tensor, source_tensor = call.args[0], call.args[1]
                gpu.do(device.index, lambda: _copy(target_tensor, source_tensor))
                return target_tensor
            return func(*call.args, **call.kwargs)
        if target.index is None:
            target = torch.device("cuda", gpu.current)
        if target.index >= gpu.devices:
            raise RuntimeError("CUDA error: invalid device ordinal")
        return self._run(func, name, call, target)

    def _run(self, func: Any, name: str, call: _Call, device: torch.device) -> Any:
        """Runs the operator on CPU tensors, now and at every replay of the graph that captures it."""
        if name in ALLOCATIONS:
            made = func(*call.args, **call.kwargs)
            self.gpu.allocations += 1
            torch.empty(0, dtype=torch.uint8).set_(made.untyped_storage())[:MAX_MARKED].fill_(UNWRITTEN)
            return made if self.gpu.acting else DeviceTensor(made, device, self.gpu)
        gpu, old = self.gpu, {each.untyped_storage().data_ptr() for each in _tensors((call.args, call.kwargs))}
        found = func(*call.args, **call.kwargs)
        made = list(_tensors(found))
        writes = func._schema.is_mutable
        fresh = [each for each in made if each.untyped_storage().data_ptr() not in old]
        if writes or fresh:
            gpu.operators[name] += 1
        graph = gpu.graph_of(device.index)
        if graph is not None and writes:
            graph.work.append(lambda: func(*call.args, **call.kwargs))
        elif graph is not None and fresh:
            graph.work.append(lambda: _run_again(func, call, made))
        return found if self.gpu.acting else mapped(lambda each: self._wrap(each, call, device), found)

    def _wrap(self, value: Any, call: _Call, device: torch.device) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, DeviceTensor):
            return value
        known = call.wrappers.get(id(value))
        return known if known is not None else DeviceTensor(value, device, self.gpu)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)


def _run_again(func: Any, call: _Call, made: list[torch.Tensor]) -> None:
    """Runs a captured operator and writes its results to the memory of the first run."""
    for place, value in zip(made, _tensors(func(*call.args, **call.kwargs)), strict=True):
        place.copy_(value)
