"""Finds arguments of the wrong type, once a call has failed. Tests: tests/kernels/test_argument_types.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import signature
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from torch import Tensor


def explain_wrong_type(
    op: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> str | None:
    """Compares the arguments of a call with the annotations of a function, as far as these name tensors and records.

    Args:
        op: Name of the operator, with which the message begins.
        function: The function that has the annotations.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.

    Returns:
        A sentence about the first argument of the wrong type. None if there is none, if the call lacks arguments or has
        too many, or if the annotations cannot be read.
    """
    try:
        given, expected = signature(function).bind(*args, **kwargs).arguments, get_type_hints(function)
    except (NameError, TypeError):
        return None
    for name, value in given.items():
        if name in expected and not _fits(value, expected[name]):
            got = type(value).__name__
            if isinstance(value, (list, tuple)):
                got += f" of {', '.join(dict.fromkeys(type(each).__name__ for each in value)) or 'nothing'}"
            return f"{op}: {name} is {got}; expected {_in_words(expected[name])}"
    return None


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value has a type, as far as that is checked."""
    of, origin = get_args(hint), get_origin(hint)
    if origin is tuple and of[-1:] != (...,):
        return isinstance(value, (list, tuple)) and len(value) == len(of) and all(map(_fits, value, of))
    if origin in (tuple, list, Sequence, Iterable):
        if isinstance(value, (list, tuple)):
            return all(_fits(each, of[0]) for each in value)
        return not isinstance(value, str) and hasattr(value, "__getitem__")  # also what is read as a sequence
    if of:
        return any(_fits(value, each) for each in of)
    return not _is_checked(hint) or isinstance(value, hint)


def _is_checked(hint: Any) -> bool:
    """Whether a type is None, a tensor or a record. Numbers are left to the operator."""
    return isinstance(hint, type) and (
        hint in (Tensor, NoneType) or hasattr(hint, "__dataclass_fields__") or hasattr(hint, "_fields")
    )


def _in_words(hint: Any) -> str:
    """A type, as a message names it."""
    of = [each for each in get_args(hint) if each not in (NoneType, ...)]
    origin = get_origin(hint)
    if origin in (tuple, list, Sequence, Iterable):
        inside = " and ".join(dict.fromkeys(_in_words(each).removeprefix("a ") + "s" for each in of))
        return (
            f"a tuple of {len(of)} {inside}" if origin is tuple and of == [*get_args(hint)] else f"a list of {inside}"
        )
    if of:
        return " or ".join(dict.fromkeys(map(_in_words, of)))
    return "a tensor" if hint is Tensor else f"a {getattr(hint, '__name__', hint)}"
