"""Globals of Triton kernels: Triton compares them at each launch, and a value that differs from itself (NaN) raises.

Compilation ahead of time and the interpreter do not compare them.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import specdec_kernels
from specdec_kernels.inspection import machine_code

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(machine_code.unavailable_reason() is not None, reason=str(machine_code.unavailable_reason())),
]
PLANTED = tl.constexpr(float("nan"))


@triton.jit
def fill(out):
    tl.store(out, PLANTED)


@triton.jit
def fill_by_call(out):
    fill(out)


def kernels() -> Iterator[tuple[str, Any]]:
    """Every function for Triton in the package, by "module:name"; modules of operators without "ops."."""
    folder = Path(specdec_kernels.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        if "import triton.language" in path.read_text(encoding="utf-8"):
            module = ".".join(path.relative_to(folder).with_suffix("").parts)
            for name, value in vars(import_module(f"specdec_kernels.{module}")).items():
                if isinstance(value, triton.JITFunction) and value.__module__ == f"specdec_kernels.{module}":
                    yield f"{module.removeprefix('ops.')}:{name}", value


def unequal(kernel: Any) -> list[str]:
    """Returns the names of globals, called functions included, that Triton would report as changed."""
    assert kernel.cache_key  # collects them
    used = kernel.used_global_vals.items()
    return [name for (name, _), (value, where) in used if where[name] != value]


def test_no_global_of_a_kernel_differs_from_itself() -> None:
    found = dict(kernels())
    assert {variant.kernel for variant in machine_code.variants()} <= set(found)
    assert {name: unequal(kernel) for name, kernel in found.items() if unequal(kernel)} == {}


@pytest.mark.parametrize("kernel", [fill, fill_by_call], ids=["own", "of a called function"])
def test_a_nan_is_found(kernel: Any) -> None:
    assert unequal(kernel) == ["PLANTED"]
