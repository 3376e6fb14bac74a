"""Reference of the interfaces and of what implements them: rules, drafters and targets, as their packages list them.

Tests: tests/docs/test_reference.py.
"""

from __future__ import annotations

from importlib import import_module

from operator_tables import directive


def interfaces() -> str:
    """The documentation of all protocols and values of `specdec_fast.interfaces`, by name."""
    module = import_module("specdec_fast.interfaces")
    return "\n\n".join(directive(f"{module.__name__}.{name}", 2) for name in module.__all__)


def rules() -> str:
    """A section for every verification rule, named by its key."""
    from specdec_fast.rules import rule_names

    return "\n\n".join(
        _sections("specdec_fast.rules", name, import_module(f"specdec_fast.rules.{name}").RULE.__class__)
        for name in rule_names()
    )


def drafters() -> str:
    """A section for every built-in drafter, named by its key."""
    from specdec_fast.drafters import drafter_names, get_drafter

    kinds = {name: get_drafter(name) for name in drafter_names()}
    return "\n\n".join(
        _sections("specdec_fast.drafters", name, kind)
        for name, kind in kinds.items()
        if kind.__module__.startswith("specdec_fast.")
    )


def targets() -> str:
    """The documentation of every public target."""
    import specdec_fast.targets

    return "\n\n".join(directive(f"specdec_fast.targets.{name}", 2) for name in specdec_fast.targets.__all__)


def _sections(package: str, name: str, kind: type) -> str:
    """The module's own text under the key, then its class."""
    module = import_module(f"{package}.{name}")
    text = (module.__doc__ or "").partition("Tests:")[0].strip()
    return f"## `{name}`\n\n{text}\n\n{directive(f'{kind.__module__}.{kind.__qualname__}')}"
