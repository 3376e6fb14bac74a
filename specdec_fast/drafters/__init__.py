"""Drafters, one per module. The name of a drafter is the name of its module.

Other packages add drafters by the entry-point group `specdec_fast.drafters`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from importlib.metadata import entry_points
from numbers import Integral
from pkgutil import iter_modules
from typing import Any

from specdec_fast.core.former_names import argument_hint
from specdec_fast.interfaces import Drafter, DrafterParts, Target
from specdec_kernels.unknown_names import unknown_name

GROUP = "specdec_fast.drafters"

NO_DRAFTER = "none"
"""Stands for plain decoding where a drafter is named."""

BY_DEFAULT = "auto"
"""Drafts on a CPU where neither a drafter nor a draft model is given."""


def drafter_names() -> list[str]:
    """Returns the names of all built-in and installed drafters, sorted."""
    built_in = {module.name for module in iter_modules(__path__)}
    return sorted(built_in | {point.name for point in entry_points(group=GROUP)})


def get_drafter(name: str) -> type[Any]:
    """Returns the class of a drafter.

    Args:
        name: Name of a built-in drafter, or of an entry point.

    Returns:
        The class. `make_drafter` builds an instance by name.

    Raises:
        ValueError: If the name is unknown.
    """
    if name in {module.name for module in iter_modules(__path__)}:
        found: type[Any] = import_module(f"{__name__}.{name}").DRAFTER
        return found
    for point in entry_points(group=GROUP):
        if point.name == name:
            loaded: type[Any] = point.load()
            return loaded
    raise ValueError(unknown_name("drafter", name, drafter_names()))


def takes_draft(name: str) -> bool:
    """Returns whether a drafter requires a draft model."""
    return bool(getattr(get_drafter(name), "takes_draft", False))


def may_take_draft(name: str) -> bool:
    """Returns whether a drafter uses a draft model, with some options at least."""
    return takes_draft(name) or bool(getattr(get_drafter(name), "may_take_draft", False))


def drafter_options(name: str) -> dict[str, inspect.Parameter]:
    """Returns the options of a drafter: the parameters of its constructor that have defaults."""
    found = inspect.signature(get_drafter(name)).parameters
    return {option: each for option, each in found.items() if each.default is not inspect.Parameter.empty}


def check_option_names(name: str, options: Iterable[str]) -> None:
    """Checks the names of options.

    Args:
        name: Name of the drafter.
        options: Names of options.

    Raises:
        ValueError: If the drafter has no option of such a name.
    """
    known = drafter_options(name)
    unknown = sorted(set(options) - set(known))
    if unknown:
        if not known:
            raise ValueError(f"drafter {name}: got option {unknown[0]!r}; expected no options")
        words = argument_hint(unknown[0], "drafter", known)
        raise ValueError(f"drafter {name}: got option {unknown[0]!r}; expected one of {', '.join(known)}{words}")


def check_option_types(name: str, options: Mapping[str, Any]) -> None:
    """Checks options that are declared as integers or booleans.

    Args:
        name: Name of the drafter.
        options: Values by name.

    Raises:
        ValueError: If a value has another type.
    """
    for option, value in options.items():
        declared = drafter_options(name)[option].annotation
        types = set(declared.split(" | ")) if isinstance(declared, str) else {declared}
        if types == {"bool"} and not isinstance(value, bool):
            raise ValueError(f"drafter {name}: {option}: got {value!r}; expected true or false")
        whole = isinstance(value, Integral) and not isinstance(value, bool)
        if types == {"int"} and not whole:
            raise ValueError(f"drafter {name}: {option}: got {value!r}; expected a whole number")
        if types == {"int", "None"} and not whole and value is not None:
            raise ValueError(f"drafter {name}: {option}: got {value!r}; expected a whole number, or none")


def check_draft_model(name: str, given: bool) -> None:
    """Checks that a drafter which requires a draft model gets one.

    Args:
        name: Name of the drafter.
        given: Whether there is a draft model.

    Raises:
        ValueError: If it is missing.
    """
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
    """Builds a drafter by name.

    Args:
        name: Name of the drafter.
        options: Values of options by name.
        target: The target to draft for.
        tokenizer: The target's tokenizer, or None.
        draft: Opens the draft model. None: there is none.
        prefers: How the rule wants draft tokens picked (`Rule.prefers`).

    Returns:
        The drafter.

    Raises:
        ValueError: If an option is unknown or refused, if a file cannot be opened, or if a draft model is missing or
            does not fit. The message begins with "drafter NAME: ".
    """
    check_option_names(name, options)
    check_option_types(name, options)
    check_draft_model(name, draft is not None)

    def make(other: str, **theirs: Any) -> Drafter:
        return make_drafter(other, theirs, target=target, tokenizer=tokenizer, draft=draft, prefers=prefers)

    build: Any = get_drafter(name)
    try:
        if not hasattr(build, "from_parts"):
            made: Drafter = build(**options)
        else:
            made = build.from_parts(DrafterParts(target, tokenizer, draft, prefers, make), **options)
    except TypeError as error:  # an option whose type its checks do not expect
        defaults = ", ".join(f"{option}={each.default!r}" for option, each in drafter_options(name).items())
        raise ValueError(
            f"drafter {name}: got {dict(options)} ({error}); expected values like the defaults: {defaults}"
        ) from error
    except OSError as error:
        reason = str(error) if error.filename is None else f"got {str(error.filename)!r}: {error.strerror}"
        raise ValueError(f"drafter {name}: {reason}; expected a readable file") from error
    except ValueError as error:
        raise ValueError(_prefix_name(name, str(error))) from error
    return made


def _prefix_name(name: str, message: str) -> str:
    """Prefixes a message with the drafter's name, unless it names a drafter already."""
    if message.startswith("drafter "):
        return message
    return f"drafter {name}: {message.removeprefix(f'{name} ').removeprefix(f'{name}: ')}"
