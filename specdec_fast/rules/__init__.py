"""Verification rules: pure functions from a draft and the target's distributions to an `Acceptance`.

The name of a rule is the name of its module.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from specdec_fast.core.former_names import RENAMED_RULES
from specdec_fast.interfaces import Needs, Rule
from specdec_fast.sampling.params import SamplingParams
from specdec_kernels.unknown_names import unknown_name

DEFAULT = "replay"
LOSSY = "lossy"


def rule_names() -> list[str]:
    """Returns the names of all rules, sorted."""
    return sorted(module.name for module in iter_modules(__path__))


def get_rule(rule: str | Rule = DEFAULT) -> Rule:
    """Returns a rule by its name.

    Args:
        rule: A name, which may carry options: "lossy:lenience=0.5". A rule object is returned unchanged.

    Returns:
        The rule.

    Raises:
        ValueError: If the name or an option is unknown, or if a rule object is not lossless and its name does not begin
            with "lossy".
    """
    if not isinstance(rule, str):
        if not (hasattr(rule, "lossless") and hasattr(rule, "why_not")):
            raise ValueError(f"rule: got {rule!r:.60}; expected a name ({', '.join(rule_names())}) or a Rule")
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


def _compatible_rules(needs: Needs, temperature: float) -> list[str]:
    """Returns the names of the lossless rules that can verify the drafts of a drafter at a temperature."""
    params = SamplingParams(temperature=temperature)
    rules = [rule for rule in map(get_rule, rule_names()) if rule.lossless and rule.why_not(needs) is None]
    return [rule.name for rule in rules if rule.why_not_sampling(params) is None]


def rule_origin(rule: str | Rule) -> str:
    """Returns where a rule comes from: the default, a name, or an object."""
    if rule == DEFAULT:
        return "the default"
    return "asked for by name" if isinstance(rule, str) else "passed as an object"


def rule_for(
    rule: str | Rule, needs: Needs, temperature: float | None = None, drafter: str | None = None
) -> tuple[Rule, str]:
    """Returns the rule that verifies the drafts of a drafter. Rule `best` chooses another one here.

    Args:
        rule: A name or a rule.
        needs: Needs of the drafter.
        temperature: The temperature of all requests. None if they differ or are unknown.
        drafter: Name of the drafter, for the message.

    Returns:
        The rule, and the reason for it in one sentence.

    Raises:
        ValueError: If the rule cannot verify such drafts. The message names the rules that can.
    """
    found, why = get_rule(rule), rule_origin(rule)
    choose = getattr(found, "choose_rule", None)  # rule best names another one
    if choose is not None:
        found, why, _ = choose(needs, temperature)
    reason = found.why_not(needs)
    if reason is not None:
        others = _compatible_rules(needs, 1.0 if temperature is None else temperature)
        if drafter is not None:
            reason = reason.replace("got a drafter that", f"got drafter {drafter}, which", 1)
        raise ValueError(f"{reason}, or another rule ({', '.join(others)})")
    return found, why
