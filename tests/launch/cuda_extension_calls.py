"""Calls every operator of csrc/bindings/kv_cache_cuda.cu on tensors of "cuda:1" while cuda:0 is the current device.

    python cuda_extension_calls.py LIBRARY

LIBRARY is that source, compiled by nvcc and linked with `cuda_runtime.cpp`. Prints one JSON object: for each call, what
was launched, whether the results equal those of the CPU operators, and the device that is current afterwards. It is a
process of its own because the library gives operators of torch.ops.specdec the CUDA key.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specdec_kernels.dispatch import extension
from specdec_kernels.ops.kv_commit.cache_table import slot_layout

HERE, CURRENT = 1, 0
CUDA = 2
"""Code of the device type in DLPack."""
CODES = {
    torch.float32: (2, 32), torch.float16: (2, 16), torch.int32: (0, 32), torch.int64: (0, 64), torch.int8: (0, 8),
}  # fmt: skip
"""DLPack's code and number of bits of a dtype."""


class DLTensor(ctypes.Structure):
    """DLTensor of dlpack.h, followed by the rest of DLManagedTensor."""

    _fields_ = [
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device", ctypes.c_int32),
        ("dimensions", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p),
    ]  # fmt: skip


HELD: list[Any] = []
"""Memory that tensors on a device stand for."""


def on_gpu(tensor: Tensor, device: int = HERE) -> Tensor:
    """Returns a tensor that says it lies on a GPU, on the memory of a CPU tensor."""
    numbers = ctypes.c_int64 * tensor.dim()
    shape, strides = numbers(*tensor.shape), numbers(*tensor.stride())
    made = DLTensor(tensor.data_ptr(), CUDA, device, tensor.dim(), *CODES[tensor.dtype], 1, shape, strides, 0)
    HELD.append((made, shape, strides, tensor))
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return torch._C._from_dlpack(capsule(ctypes.addressof(made), b"dltensor", None))  # type: ignore[attr-defined]


def on_gpus(value: Any, device: int = HERE) -> Any:
    """`on_gpu` for tensors in lists too; anything else as it is."""
    if isinstance(value, Tensor):
        return on_gpu(value, device)
    return [on_gpus(each, device) for each in value] if isinstance(value, list) else value


PAGES, PAGE, HEADS = 5, 4, 2


def caches_of(count: int, width: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Caches [pages, page, heads, width] of different numbers; every second one lies head first."""
    made = []
    for each in range(count):
        numbers = (torch.arange(PAGES * PAGE * HEADS * width) + 7 * each) % 101
        cache = numbers.to(dtype).view(PAGES, PAGE, HEADS, width)
        made.append(cache.transpose(1, 2).contiguous().transpose(1, 2) if each % 2 else cache)
    return made


def ints(*values: int) -> Tensor:
    """An int32 tensor."""
    return torch.tensor(values, dtype=torch.int32)


def trees(rows: int = 2) -> list[Tensor]:
    """page_table, lengths, path, offsets and num_accepted of two rows, or of none."""
    if rows == 0:
        empty = torch.zeros(0, 2, dtype=torch.int32)
        return [empty, ints(), empty[:, :1], ints(0), ints()]
    path = torch.tensor([[0, 2, 3], [4, 6, -1]], dtype=torch.int32)
    return [torch.tensor([[1, 2], [3, 4]], dtype=torch.int32), ints(3, 1), path, ints(0, 4, 7), ints(2, 1)]


def layout(caches: list[Tensor]) -> Tensor:
    """The layouts of a CacheTable, int64 [n, 6]."""
    return torch.tensor([slot_layout(each) for each in caches], dtype=torch.int64)


Arguments = tuple[list[Any], list[Tensor]]
"""Of a call, and the tensors that it writes to."""


def stage(width: int, dtype: torch.dtype) -> Arguments:
    """kv_stage of three nodes, one of them to the trash."""
    key, value = ((torch.arange(3 * HEADS * width) % 97 + add).to(dtype).view(3, HEADS, width) for add in (1, 2))
    into = caches_of(2, width, dtype)
    return [key, value, *into, torch.tensor([6, -1, 17])], into


def commit(count: int, width: int = 4, dtype: torch.dtype = torch.float32, rows: int = 2) -> Arguments:
    """kv_commit of a list of caches."""
    caches, advanced = caches_of(count, width, dtype), ints(9, 9, 9)
    own = [ints(2, 0), advanced] if rows else [ints(), advanced]
    return [caches, *trees(rows), *own], [*caches, advanced]


def commit_table(rows: int = 2) -> Arguments:
    """kv_commit of a CacheTable."""
    caches, advanced = caches_of(3, 4), ints(9, 9, 9)
    own = [ints(2, 0), advanced] if rows else [ints(), advanced]
    return [layout(caches), layout(caches), PAGES, PAGE, 0, *trees(rows), *own], [*caches, advanced]


def commit_scratch() -> Arguments:
    """kv_commit_scratch: seven packed nodes into two caches, lengths left alone."""
    caches = caches_of(2, 4)
    scratch = [torch.arange(7.0 * HEADS * 4).view(1, 7, HEADS, 4) + each for each in (1000, 2000)]
    HELD.extend(scratch)
    return [layout(caches), layout(scratch), PAGES, PAGE, 7, *trees(), None, None], caches


def commit_pages() -> Arguments:
    """kv_commit_pages of two rows."""
    table = torch.arange(16, dtype=torch.int32).view(2, 8)
    _, lengths, path, offsets, accepted = trees()
    advanced, own = ints(9, 9, 9), torch.arange(100, 124, dtype=torch.int32).view(3, 8)
    return [table, lengths, path, offsets, accepted, ints(2, 0), advanced, own], [advanced, own]


CASES: dict[str, Callable[[], Arguments]] = {
    "kv_stage/16": lambda: stage(4, torch.float32),
    "kv_stage/8": lambda: stage(4, torch.float16),
    "kv_stage/4": lambda: stage(2, torch.float16),
    "kv_stage/2": lambda: stage(1, torch.float16),
    "kv_stage/1": lambda: stage(3, torch.int8),
    "kv_commit/16": lambda: commit(2),
    "kv_commit/1": lambda: commit(3, 3, torch.int8),
    "kv_commit/130 caches": lambda: commit(130),
    "kv_commit/no rows": lambda: commit(2, rows=0),
    "kv_commit_table/in place": commit_table,
    "kv_commit_table/scratch": commit_scratch,
    "kv_commit_table/no rows": lambda: commit_table(0),
    "kv_commit_pages/two rows": commit_pages,
}
"""Operator of torch.ops.specdec, and what is special."""


def main(path: str) -> None:
    """Calls all and prints what happened."""
    assert extension.unavailable_reason() is None, extension.unavailable_reason()
    torch.cuda._lazy_init = lambda: None  # type: ignore[assignment] # tensors that say they lie on a GPU need none
    torch.ops.load_library(path)
    runtime: Any = ctypes.CDLL(path)
    runtime.simulated_gpu_launches.restype = ctypes.c_char_p
    runtime.simulated_gpu_stream.restype = ctypes.c_ssize_t
    found: dict[str, Any] = {}
    for name, make in CASES.items():
        operator = getattr(torch.ops.specdec, name.partition("/")[0]).default
        (arguments, want), (mine, got) = make(), make()
        operator(*arguments)
        runtime.simulated_gpu_clear()
        runtime.simulated_gpu_set_device(CURRENT)
        operator(*on_gpus(mine))
        launches = [line.split() for line in runtime.simulated_gpu_launches().decode().splitlines()]
        equal = all(torch.equal(one, other) for one, other in zip(want, got, strict=True))
        found[name] = {"launches": launches, "equal": equal, "current": runtime.simulated_gpu_device()}
    found["failure"] = failure(runtime)
    found["streams"] = [runtime.simulated_gpu_stream(device) for device in (0, 1)]
    print(json.dumps(found))


def failure(runtime: Any) -> dict[str, Any]:
    """What a call says whose launch fails, or whose tensors lie on two devices."""
    errors = []
    for devices in ((1, 1), (1, 0)):
        arguments, _ = commit(2)
        runtime.simulated_gpu_clear()
        runtime.simulated_gpu_fail(9 if devices == (1, 1) else 0)
        try:
            torch.ops.specdec.kv_commit.default(
                *on_gpus(arguments[:1], devices[0]), *on_gpus(arguments[1:], devices[1])
            )
        except (RuntimeError, ValueError) as error:
            errors.append(str(error).splitlines()[0])
    return {
        "errors": errors,
        "launches": runtime.simulated_gpu_launches().decode(),
        "current": runtime.simulated_gpu_device(),
    }


if __name__ == "__main__":
    main(sys.argv[1])
