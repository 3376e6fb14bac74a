"""Launch configurations of Triton kernels for compilation ahead of time.

Tests: tests/machine_code/test_machine_code.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")


@dataclass(frozen=True)
class Variant:
    """One kernel with one launch configuration.

    Attributes:
        name: "operator/configuration".
        kernel: "module:function" below specdec_kernels.ops.
        arguments: Triton types of the arguments that are not constants, in any order: "*bf16" (a pointer to 16-byte
            aligned memory), "*u8:1" (unaligned), "i32" or "i32:16" (an integer that 16 divides), "fp32". Hints
            apply to arguments that the kernel specialises, as in a launch.
        constants: Values of the constexpr arguments.
        warps: Launch option num_warps.
        stages: Launch option num_stages.
        everyday: Architectures to compile in every test run. `make kernels-full` compiles all.
        architectures: All architectures of the variant.
        fusion: Whether a * b + c may become one instruction.
        most_registers: Launch option maxnreg. It also prevents ptxas from using fewer registers and spilling.
    """

    name: str
    kernel: str
    arguments: Mapping[str, str]
    constants: Mapping[str, Any] = field(default_factory=dict)
    warps: int = 4
    stages: int = 3
    everyday: tuple[str, ...] = ("sm_90",)
    architectures: tuple[str, ...] = ARCHITECTURES
    fusion: bool = True
    most_registers: int | None = None


def size_type(unaligned: bool) -> str:
    """Names the type of an integer argument that a kernel specialises, such as a vocabulary or a row stride.

    Args:
        unaligned: Whether the variant stands for integers that 16 does not divide.

    Returns:
        A type for `Variant.arguments`: "i32" if unaligned. Otherwise "i32:16", and Triton may assume that 16 divides
        the integer.
    """
    return "i32" if unaligned else "i32:16"
