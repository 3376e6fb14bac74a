"""Drafters: one file each, the file name is the key; more come from the entry-point group `specdec_fast.drafters`."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points
from pkgutil import iter_modules
from typing import Any

GROUP = "specdec_fast.drafters"


def drafter_names() -> list[str]:
    """Names of all drafters that can be built here."""
    built_in = {module.name for module in iter_modules(__path__)}
    return sorted(built_in | {point.name for point in entry_points(group=GROUP)})


def get_drafter(name: str) -> type[Any]:
    """The drafter class of a name. Raises ValueError for an unknown name."""
    if name in {module.name for module in iter_modules(__path__)}:
        found: type[Any] = import_module(f"{__name__}.{name}").DRAFTER
        return found
    for point in entry_points(group=GROUP):
        if point.name == name:
            loaded: type[Any] = point.load()
            return loaded
    raise ValueError(f"drafter: got {name!r}; expected one of {', '.join(drafter_names())}")
