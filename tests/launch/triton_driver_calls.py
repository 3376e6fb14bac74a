"""Calls every operator with Triton's own driver and launcher, which launch on the libcuda.so.1 of `cuda_driver.c`.

    python triton_driver_calls.py FOLDER ARCHITECTURE operators
    python triton_driver_calls.py FOLDER ARCHITECTURE faults

FOLDER holds that library. Each launch is compared with the Python call that made it, and the first that differs ends
the program. Prints one JSON object: which kernels were launched, or what became of planted faults. It is a process of
its own because Triton and the library keep modules and devices for the life of a process.
"""

from __future__ import annotations

import ctypes
import inspect
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from specdec_kernels import OPS, simulated_gpu
from specdec_kernels.ops.tree_attention import plan_for
from specdec_kernels.simulated_gpu.runtime import PROCESSORS
from specdec_kernels.testing.agreement import SAMPLES, cases, make_sample
from specdec_kernels.testing.samples_attention import Sizes

HERE = 1
"""The device that operators are called on, while the first is the current one."""
SIZES = Sizes(rows=3, nodes=5, length=33, heads=4, kv_heads=2, width=64, vocab=3000)
DTYPES = (torch.float32, torch.bfloat16)
TRITON = sorted(name for name in SAMPLES if any(backend.name == "triton" for backend in OPS[name].backends))
POINTERS = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64", torch.bool: "i1",
    torch.int8: "i8", torch.uint8: "u8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64",
    torch.float8_e4m3fn: "fp8e4nv", torch.float8_e5m2: "fp8e5",
}  # fmt: skip
"""What Triton calls the elements of a tensor."""


def packed(kind: str, value: Any) -> bytes:
    """Returns a parameter of a Triton type as it lies in memory."""
    if kind.startswith("*"):
        assert value is None or kind[1:] == POINTERS[value.dtype], f"{kind} for a tensor of {value.dtype}"
        return struct.pack("<Q", 0 if value is None else value.data_ptr())
    if kind in ("fp16", "fp32", "fp64"):
        return struct.pack({"fp16": "<e", "fp32": "<f", "fp64": "<d"}[kind], value)
    assert not isinstance(value, float), f"{kind} for the float {value}"
    size = max(1, int(kind[1:]) // 8)
    return int(value).to_bytes(size, "little", signed=kind.startswith("i") and kind != "i1")


def expected(function: Any, args: Any, options: dict[str, Any], kernel: Any) -> list[tuple[str, bytes]]:
    """Returns names and bytes of the parameters that a call of a kernel asks for."""
    names = inspect.signature(function.fn)
    bound = names.bind(*args, **{name: value for name, value in options.items() if name in names.parameters})
    bound.apply_defaults()
    kinds = kernel.src.signature
    given = [(name, kinds[name], value) for name, value in bound.arguments.items() if kinds[name] != "constexpr"]
    scratch = [(name, struct.pack("<Q", 0)) for name in ("global scratch", "profile scratch")]
    return [(name, packed(kind, value)) for name, kind, value in given] + scratch


def differences(
    gpu: simulated_gpu.Gpu, line: str, function: Any, args: Any, options: dict[str, Any], kernel: Any
) -> str:
    """Returns what a launch on the library has that is not what the call asks for, or "".

    Args:
        gpu: The simulated GPU, whose last launch is that of the call.
        line: The launch as the library wrote it down.
        function: The kernel as Python knows it.
        args: Arguments of the call, tensors first.
        options: More arguments of the call, and options of the launch.
        kernel: What Triton compiled.
    """
    place = next(each.device.index for each in args if isinstance(each, torch.Tensor))
    parameters = expected(function, args, options, kernel)
    want = {
        "kernel": function.fn.__name__,
        "device": str(place),
        "stream": str(torch.cuda.current_stream(place).cuda_stream),
        "grid": ",".join(str(each) for each in (*gpu.launches[-1].grid, 1, 1)[:3]),
        "block": f"{32 * options.get('num_warps', 4)},1,1",
        "shared memory": str(kernel.metadata.shared),
        "number of attributes": "0",
        "number of parameters": str(len(parameters)),
    }
    *launch, data = line.split()
    found = data.split(",")
    got = dict(zip(want, (*launch, str(len(found))), strict=True))
    want |= {f"parameter {name}": each.hex() for name, each in parameters}
    got |= {f"parameter {name}": each for (name, _), each in zip(parameters, found)}
    return "; ".join(f"{key} is {got.get(key)}, expected {want[key]}" for key in want if got.get(key) != want[key])


@contextmanager
def launching(folder: Path, architecture: str) -> Iterator[tuple[simulated_gpu.Gpu, Any, list[str]]]:
    """Two simulated GPUs with Triton's driver on the library. Yields them, the library and one line per launch."""
    from triton.backends.nvidia.driver import CudaDriver

    library: Any = ctypes.CDLL(str(folder / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)  # found by its name from now on
    library.simulated_gpu_last.restype = ctypes.c_char_p
    held: list[Any] = []
    seen: list[str] = []

    def make(gpu: simulated_gpu.Gpu) -> Any:
        held.append(ctypes.CFUNCTYPE(ctypes.c_int)(lambda: gpu.current))  # contexts follow torch's current device
        number, shared = int(architecture.removeprefix("sm_")), simulated_gpu.SHARED_MEMORY[architecture]
        library.simulated_gpu_gpu(number, gpu.devices, shared, PROCESSORS, held[-1])
        driver = CudaDriver()
        driver.get_current_stream = lambda device: torch.cuda.current_stream(device).cuda_stream
        return driver

    with simulated_gpu.gpu(architecture, devices=2, make_driver=make) as gpu:
        inner = JITFunction.run

        def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            before = library.simulated_gpu_launches()
            kernel = inner(self, *args, grid=grid, warmup=warmup, **options)
            assert library.simulated_gpu_launches() == before + 1, f"{self.fn.__name__}: no launch reached the library"
            seen.append(library.simulated_gpu_last().decode())
            wrong = differences(gpu, seen[-1], self, args, options, kernel)
            assert not wrong, f"{self.fn.__name__}: {wrong}"
            return kernel

        with patch.object(JITFunction, "run", run):
            yield gpu, library, seen


def planted(out, first, second, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(out + tl.arange(0, SIZE), first - second)


def error_of(call: Callable[[], Any]) -> str:
    """Returns the error of a call, or "nothing"."""
    try:
        call()
    except Exception as error:  # which one, the test asks
        return f"{type(error).__name__}: {error}"
    return "nothing"


def faults(library: Any) -> dict[str, str]:
    """Plants faults between a call and the library. Returns what each raised."""
    from triton.runtime import driver

    active = driver.active
    out = torch.empty(64, dtype=torch.int32, device="cuda:0")

    def launch(**options: Any) -> Any:
        return triton.jit(planted)[(2,)](out, 5, 3, SIZE=64, **options)

    class Swapped(active.launcher_cls):  # type: ignore[misc, name-defined]
        """Gives the kernel its two integers in the wrong order."""

        def __call__(self, *args: Any) -> Any:
            *rest, first, second, size = args
            return super().__call__(*rest, second, first, size)

    found = {"none": error_of(launch)}
    kernel = launch()
    block = kernel.packed_metadata
    found["a float for an int"] = error_of(lambda: kernel[(1, 1, 1)](out, 2.5, 3, 64))
    with patch.object(active, "launcher_cls", Swapped):
        found["arguments in another order"] = error_of(launch)
    with patch.object(kernel, "packed_metadata", (2 * block[0], *block[1:])):
        found["more warps than compiled for"] = error_of(lambda: kernel[(1, 1, 1)](out, 5, 3, 64))
    with patch.object(kernel, "packed_metadata", (*block[:2], 50_000)):
        found["more shared memory than asked for"] = error_of(lambda: kernel[(1, 1, 1)](out, 5, 3, 64))
    other = torch.cuda.Stream("cuda:1")
    library.simulated_gpu_stream(ctypes.c_void_p(other.cuda_stream), 1)
    with patch.object(active, "get_current_stream", lambda device: other.cuda_stream):
        found["the stream of another device"] = error_of(launch)
    with torch.cuda.device(1):
        found["a kernel of another device"] = error_of(lambda: kernel[(1, 1, 1)](out, 5, 3, 64))
    little = {**active.utils.get_device_properties(0), "max_shared_mem": 100}
    call = make_sample("distribution_stats", SIZES, "cuda:1")
    with patch.object(active.utils, "get_device_properties", lambda device: little):
        found["less shared memory than the kernel takes"] = error_of(lambda: OPS["distribution_stats"](*call.arguments))
    return found


def operators(library: Any, gpu: simulated_gpu.Gpu, seen: list[str]) -> dict[str, Any]:
    """Calls every sample of every operator.

    Returns:
        The kernels, the number of launches, the most shared memory of one, and the samples that Triton does not serve.
    """
    own = torch.cuda.Stream(HERE)
    library.simulated_gpu_stream(ctypes.c_void_p(own.cuda_stream), HERE)
    torch.cuda.set_stream(own)  # type: ignore[arg-type]
    torch.cuda.set_device(0)
    refused: set[str] = set()
    for op in TRITON:
        for case in cases(op):
            for dtype in DTYPES if "dtype" in SAMPLES[op].names else DTYPES[:1]:
                call = make_sample(op, replace(SIZES, dtype=dtype), f"cuda:{HERE}", case)
                if OPS[op].choose_backend(*call.arguments, **call.options) == "triton":
                    OPS[op](*call.arguments, **call.options)
                else:
                    refused.add(f"{op}/{case}")
    attention = make_sample("tree_attention", replace(SIZES, dtype=torch.bfloat16), f"cuda:{HERE}")
    query, keys, _, table, lengths, offsets, ancestors, *_ = attention.arguments
    plan = plan_for(query, keys, table, lengths, offsets, ancestors)
    OPS["tree_attention"](*attention.arguments, **attention.options, plan=plan)
    return {
        "kernels": sorted({launch.kernel for launch in gpu.launches}),
        "launches": len(seen),
        "most_shared": max(launch.shared for launch in gpu.launches),
        "refused": sorted(refused),
    }


def main(folder: str, architecture: str, part: str) -> None:
    """Calls all and prints what happened."""
    try:
        with launching(Path(folder), architecture) as (gpu, library, seen):
            found = operators(library, gpu, seen) if part == "operators" else faults(library)
            print(json.dumps(found), flush=True)
            os._exit(0)  # kernels that are unloaded later ask for a driver that is gone by then
    except subprocess.CalledProcessError as error:
        print(json.dumps({"missing": f"Triton's driver.c does not compile here: {error}"}))


if __name__ == "__main__":
    main(*sys.argv[1:])
