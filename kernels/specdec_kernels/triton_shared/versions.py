"""Versions of Triton that the kernels are tested with; `ceilings.json` has a section for each.

Tests: tests/launch/test_devices_refused.py.
"""

from __future__ import annotations

import warnings
from functools import lru_cache

FIRST, LAST = (3, 6), (3, 9)
"""Minor versions, both included."""


def tested_range() -> str:
    """Returns the range of versions as documents write it, such as "3.6 to 3.9"."""
    return " to ".join(".".join(map(str, each)) for each in (FIRST, LAST))


def untested_warning(version: str) -> str | None:
    """Returns a warning about a version of Triton outside of the range, or None.

    Args:
        version: Such as "3.9.0" or "3.10.0+git1234".
    """
    major, minor = (int(part) for part in version.split(".")[:2])
    if FIRST <= (major, minor) <= LAST:
        return None
    return (
        f"Triton {version} is outside of the tested range, {tested_range()}: the kernels run, but their results and "
        f"speed are not known; install triton=={LAST[0]}.{LAST[1]}.* for tested ones"
    )


@lru_cache(maxsize=1)
def warn_if_untested() -> None:
    """Warns once per process if the installed version of Triton is outside of the range."""
    import triton

    warning = untested_warning(triton.__version__)
    if warning is not None:
        warnings.warn(warning, RuntimeWarning, stacklevel=2)
