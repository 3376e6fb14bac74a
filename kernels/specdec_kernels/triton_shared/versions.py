"""Versions of Triton that the kernels are tested with: `ceilings.json` has a section for each."""

from __future__ import annotations

import warnings
from functools import lru_cache

FIRST, LAST = (3, 6), (3, 9)
"""Minor versions, both included."""


def in_words() -> str:
    """Returns the range as documents write it, such as "3.6 to 3.9"."""
    return " to ".join(".".join(map(str, each)) for each in (FIRST, LAST))


def untested(version: str) -> str | None:
    """Returns what to know about a version of Triton outside of the range, or None for one inside.

    Args:
        version: Such as "3.9.0" or "3.10.0+git1234".
    """
    major, minor = (int(part) for part in version.split(".")[:2])
    if FIRST <= (major, minor) <= LAST:
        return None
    return (
        f"Triton {version} is outside of the tested range, {in_words()}: the kernels run, but their results and speed "
        f"are not known; install triton=={LAST[0]}.{LAST[1]}.* for tested ones"
    )


@lru_cache(maxsize=1)
def warn_if_untested() -> None:
    """Warns once per process where the Triton that is installed is outside of the range."""
    import triton

    told = untested(triton.__version__)
    if told is not None:
        warnings.warn(told, RuntimeWarning, stacklevel=2)
