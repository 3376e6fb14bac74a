"""Which vLLM the plugin serves: its versions, and the signatures of what the plugin replaces or calls.

Tests: tests/integrations/vllm/test_plugin.py.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

SUPPORTED = ((0, 32), (0, 33))
"""First supported version, and first version that is not."""

Signature = tuple[Callable[..., Any] | None, Sequence[str]]


def why_not_version(found: str | None = None) -> str | None:
    """Compares the version of vLLM.

    Args:
        found: The version. None: that of the installed vLLM.

    Returns:
        Why the plugin does not serve it, in one message, or None.
    """
    found = _installed_version() if found is None else found
    first, beyond = (".".join(map(str, each)) for each in SUPPORTED)
    numbers = _numbers(found)
    if numbers is not None and SUPPORTED[0] <= numbers < SUPPORTED[1]:
        return None
    return (
        f"specdec: got vLLM {found}; expected at least {first} and below {beyond}; vLLM runs without the plugin; "
        f"install vllm>={first},<{beyond}, or a specdec-fast that supports this version"
    )


def _installed_version() -> str:
    from vllm.version import __version__

    return str(__version__)


def _numbers(version: str) -> tuple[int, int] | None:
    """Major and minor number of a version such as "0.32.1.dev3+cpu"."""
    parts = version.split(".")[:2]
    return (int(parts[0]), int(parts[1])) if len(parts) == 2 and all(each.isdigit() for each in parts) else None


def other_signatures(expected: Mapping[str, Signature]) -> list[str]:
    """Compares the parameters of functions with those that the plugin was written for.

    Args:
        expected: By name, the function (None if there is none) and the names of its first parameters.

    Returns:
        One sentence for each difference.
    """
    found = []
    for name, (function, names) in expected.items():
        if function is None:
            found.append(f"{name} is missing")
            continue
        got = tuple(inspect.signature(function).parameters)
        if got[: len(names)] != tuple(names):
            found.append(f"{name} has the parameters ({', '.join(got)}), expected ({', '.join(names)})")
    return found


def missing_fields(owner: Any, names: Sequence[str]) -> list[str]:
    """Returns one sentence for each field that a dataclass lacks."""
    got = {each.name for each in dataclasses.fields(owner)}
    return [f"{owner.__name__} has no field {name}" for name in names if name not in got]
