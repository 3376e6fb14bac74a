"""Triton kernels whose compilation does not depend on numbers that vary during serving.

Tests: tests/machine_code/test_specialisation.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import triton

from .device_guard import on_own_device


def kernel(*specialised: str) -> Callable[[Callable[..., Any]], Any]:
    """Applies `triton.jit` to a kernel whose compilation depends only on the named arguments and on constants.

    By default, Triton recompiles a kernel for every combination of integers that are 1 or divisible by 16, and of
    pointers aligned to 16 bytes. Numbers of rows, nodes or pages and views into larger tensors change these properties
    between calls. Each change costs seconds during serving.

    Args:
        specialised: Pointers whose alignment wide loads and stores need, and integers that a model fixes, such as the
            vocabulary and row strides.

    Returns:
        The decorator, which raises ValueError if the kernel lacks one of the arguments.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        parameters = inspect.signature(function).parameters
        names = [name for name, each in parameters.items() if "constexpr" not in str(each.annotation)]
        unknown = sorted(set(specialised) - set(names))
        if unknown:
            raise ValueError(
                f"kernel {function.__name__}: got arguments {', '.join(unknown)}; expected some of {', '.join(names)}"
            )
        varying = [name for name in names if name not in specialised]
        return on_own_device(triton.jit(function, do_not_specialize=varying))

    return decorate


def unaligned_vocab(vocab: int, *strides: int) -> bool:
    """Returns whether only the mask prevents wide loads of rows.

    This is the case if 16 divides a row stride, but not the vocabulary. Kernels then mask only the last tile of a row.
    Rows that do not begin at multiples of 16 have narrow loads in any case.

    Args:
        vocab: Entries of a row.
        strides: Row strides of the matrices that a kernel reads, in elements.

    Returns:
        True if 16 divides one of the strides and not the vocabulary: the kernels' constant UNALIGNED.
    """
    return vocab % 16 != 0 and any(stride % 16 == 0 for stride in strides)


def lanes_for(count: int, least: int = 32) -> int:
    """Returns a number of lanes for a count that varies during serving.

    The number of lanes is a constant of the kernel. Few different numbers mean few compilations, and unused lanes are
    masked.

    Args:
        count: Rows, trees, words or tokens that the lanes hold.
        least: The smallest number of lanes, a power of two, as Triton's ranges are.

    Returns:
        The smallest of least, 8 * least, 64 * least, ... that is at least `count`; a power of two.
    """
    lanes = least
    while lanes < count:
        lanes *= 8
    return lanes
