"""Triton kernels whose compilation does not depend on numbers that vary while serving.

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

    Triton by default compiles a kernel anew for every combination of integers that are 1, or divisible by 16, and of
    pointers that are aligned to 16 bytes. Counts of rows, nodes or pages, and views into larger tensors, change these
    from call to call, and each change costs seconds in the middle of serving.

    Args:
        specialised: Pointers whose alignment wide loads and stores need, and integers that a model fixes, such as the
            vocabulary and row strides.

    Returns:
        The decorator. It raises ValueError if the kernel has no argument of a given name.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        given = inspect.signature(function).parameters
        names = [name for name, each in given.items() if "constexpr" not in str(each.annotation)]
        unknown = sorted(set(specialised) - set(names))
        if unknown:
            raise ValueError(f"{function.__name__} has no arguments {', '.join(unknown)}; it has {', '.join(names)}")
        varying = [name for name in names if name not in specialised]
        return on_own_device(triton.jit(function, do_not_specialize=varying))

    return decorate


def unaligned_vocab(vocab: int, *strides: int) -> bool:
    """Returns whether a mask alone keeps loads of rows from being wide.

    This is the case if 16 divides a row stride, but not the vocabulary. Kernels then mask only the last tile of a row.
    Rows that do not begin at multiples of 16 have narrow loads anyway.

    Args:
        vocab: Entries of a row.
        strides: Row strides of the matrices that a kernel reads, in elements.

    Returns:
        True if 16 divides one of the strides and not the vocabulary. It is the kernels' constant UNALIGNED.
    """
    return vocab % 16 != 0 and any(stride % 16 == 0 for stride in strides)


def lanes_for(count: int, least: int = 32) -> int:
    """Returns a number of lanes for a count that varies while serving.

    Numbers of lanes are constants of a kernel. Few numbers mean few kernels, and lanes without work are masked.

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
