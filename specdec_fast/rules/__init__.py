"""Verification rules: pure functions (draft, plan, target laws, rng) -> Acceptance. The file name is the key."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from specdec_fast.interfaces import Rule

DEFAULT = "replay"


def rule_names() -> list[str]:
    """Names of all rules."""
    return sorted(module.name for module in iter_modules(__path__))


def get_rule(rule: str | Rule = DEFAULT) -> Rule:
    """The rule of a name, or the given rule itself. Raises ValueError for an unknown name."""
    if not isinstance(rule, str):
        return rule
    if rule not in rule_names():
        raise ValueError(f"rule: got {rule!r}; expected one of {', '.join(rule_names())}")
    found: Rule = import_module(f"{__name__}.{rule}").RULE
    return found
