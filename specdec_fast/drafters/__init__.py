"""Drafters: one file each, the file name is the key; more come from the entry-point group `specdec_fast.drafters`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from importlib.metadata import entry_points
from numbers import Integral
from pkgutil import iter_modules
from typing import Any

from specdec_fast.core.names import argument_hint
from specdec_fast.interfaces import Drafter, DrafterParts, Target
from specdec_kernels.names import unknown_name

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
    raise ValueError(unknown_name("drafter", name, drafter_names()))


def takes_draft(name: str) -> bool:
    """Whether the drafter of a name wants a draft model."""
    return bool(getattr(get_drafter(name), "takes_draft", False))


def may_take_draft(name: str) -> bool:
    """Whether the drafter of a name wants a draft model, or has a use for one with some options."""
    return takes_draft(name) or bool(getattr(get_drafter(name), "may_take_draft", False))


def drafter_options(name: str) -> dict[str, inspect.Parameter]:
    """The options of a drafter by name, as its constructor declares them, without those that `DrafterParts` fills."""
    found = inspect.signature(get_drafter(name)).parameters
    return {option: each for option, each in found.items() if each.default is not inspect.Parameter.empty}


def refuse_unknown_options(name: str, options: Iterable[str]) -> None:
    """Raise ValueError where the constructor of a drafter takes no option of such a name."""
    known = drafter_options(name)
    unknown = sorted(set(options) - set(known))
    if unknown:
        if not known:
            raise ValueError(f"drafter {name}: got option {unknown[0]!r}; expected no options")
        words = argument_hint(unknown[0], "drafter", known)
        raise ValueError(f"drafter {name}: got option {unknown[0]!r}; expected one of {', '.join(known)}{words}")


def refuse_other_kinds(name: str, options: Mapping[str, Any]) -> None:
    """Raise ValueError where an option that a drafter declares as a whole number, or as true or false, is none."""
    for option, value in options.items():
        declared = drafter_options(name)[option].annotation
        kinds = set(declared.split(" | ")) if isinstance(declared, str) else {declared}
        if kinds == {"bool"} and not isinstance(value, bool):
            raise ValueError(f"drafter {name}: {option}: got {value!r}; expected true or false")
        whole = isinstance(value, Integral) and not isinstance(value, bool)
        if kinds == {"int"} and not whole:
            raise ValueError(f"drafter {name}: {option}: got {value!r}; expected a whole number")
        if kinds == {"int", "None"} and not whole and value is not None:
            raise ValueError(f"drafter {name}: {option}: got {value!r}; expected a whole number, or none")


def refuse_missing_draft(name: str, given: bool) -> None:
    """Raise ValueError where the drafter of a name wants a draft model and there is none."""
    if takes_draft(name) and not given:
        raise ValueError(f"drafter {name}: got no draft model; expected draft=, a model of the target's family")


def make_drafter(
    name: str,
    options: Mapping[str, Any],
    *,
    target: Target,
    tokenizer: Any = None,
    draft: Callable[[], Target] | None = None,
    prefers: str = "coupled",
) -> Drafter:
    """The drafter of a name out of what there is.

    Raises ValueError, which begins with "drafter NAME: ", for options that its constructor does not take or refuses,
    for files that cannot be opened, and for a draft model that is missing or does not fit.
    """
    refuse_unknown_options(name, options)
    refuse_other_kinds(name, options)
    refuse_missing_draft(name, draft is not None)

    def make(other: str, **theirs: Any) -> Drafter:
        return make_drafter(other, theirs, target=target, tokenizer=tokenizer, draft=draft, prefers=prefers)

    build: Any = get_drafter(name)
    try:
        if not hasattr(build, "from_parts"):
            made: Drafter = build(**options)
        else:
            made = build.from_parts(DrafterParts(target, tokenizer, draft, prefers, make), **options)
    except TypeError as error:  # an option of another type than its checks expect
        defaults = ", ".join(f"{option}={each.default!r}" for option, each in drafter_options(name).items())
        raise ValueError(
            f"drafter {name}: got {dict(options)} ({error}); expected values like the defaults: {defaults}"
        ) from error
    except OSError as error:
        told = str(error) if error.filename is None else f"got {str(error.filename)!r}: {error.strerror}"
        raise ValueError(f"drafter {name}: {told}; expected a file that is there and may be read") from error
    except ValueError as error:
        raise ValueError(_named(name, str(error))) from error
    return made


def _named(name: str, message: str) -> str:
    """A message that begins with the drafter's name; that of a drafter made for another one has its own."""
    if message.startswith("drafter "):
        return message
    return f"drafter {name}: {message.removeprefix(f'{name} ').removeprefix(f'{name}: ')}"
