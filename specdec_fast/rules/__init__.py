"""Verification rules: pure functions (draft, plan, target distributions, rng) -> Acceptance. The file name is the
key.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from specdec_fast.core.names import RENAMED_RULES
from specdec_fast.interfaces import Needs, Rule
from specdec_fast.sampling.params import SamplingParams
from specdec_kernels.names import unknown_name

DEFAULT = "replay"
LOSSY = "lossy"


def rule_names() -> list[str]:
    """Names of all rules."""
    return sorted(module.name for module in iter_modules(__path__))


def get_rule(rule: str | Rule = DEFAULT) -> Rule:
    """The rule of a name, or the given rule itself. A name may carry options: `lossy:lenience=0.5`.

    Raises ValueError for an unknown name, and for a rule that is not lossless without saying so in its name.
    """
    if not isinstance(rule, str):
        if not rule.lossless and rule.name.partition(":")[0] != LOSSY:
            raise ValueError(
                f"rule {rule.name}: got a rule that is not lossless; expected a name that says so: {LOSSY!r} or "
                f"'{LOSSY}:<which>'"
            )
        return rule
    key, colon, options = rule.partition(":")
    if key not in rule_names():
        raise ValueError(unknown_name("rule", key, rule_names(), renamed=RENAMED_RULES, kind="rule"))
    module = import_module(f"{__name__}.{key}")
    if colon and not hasattr(module, "with_options"):
        raise ValueError(f"rule: got {rule!r}; expected {key!r}, which has no options")
    found: Rule = module.with_options(rule, options) if colon else module.RULE
    return found


def _fitting(needs: Needs, temperature: float) -> list[str]:
    """Names of the lossless rules that verify what a drafter with these needs proposes, at this temperature."""
    params = SamplingParams(temperature=temperature)
    rules = [rule for rule in map(get_rule, rule_names()) if rule.lossless and rule.why_not(needs) is None]
    return [rule.name for rule in rules if rule.why_not_sampling(params) is None]


def rule_for(rule: str | Rule, needs: Needs, temperature: float | None = None) -> tuple[Rule, str]:
    """The rule that verifies what a drafter with these needs proposes, and why it is this one. temperature: that of all
    requests, None where they differ or are unknown.

    Raises ValueError, with the reason, when the rule cannot.
    """
    found, why = get_rule(rule), "asked for by name"
    pick = getattr(found, "pick", None)  # rule best names another one
    if pick is not None:
        found, why, _ = pick(needs, temperature)
    reason = found.why_not(needs)
    if reason is not None:
        others = _fitting(needs, 1.0 if temperature is None else temperature)
        raise ValueError(f"{reason}, or another rule ({', '.join(others)})")
    return found, why
