"""What an engine asks for: the entry `specdec` of vLLM's `additional_config`.

Tests: tests/integrations/vllm/test_plugin.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from specdec_kernels.unknown_names import unknown_name

KEY = "specdec"
RULES = ("replay", "rejection", "block")
ALIASES = {"token": "rejection"}
"""Names that other programs use, and the project's own."""
OPTIONS = ("rule", "drafter")
MAX_DRAFT_TOKENS = 128
"""Longest chain that vLLM verifies in one step."""

EXAMPLE = 'additional_config={"specdec": {"rule": "replay"}}'


@dataclass(frozen=True, slots=True)
class Settings:
    """The wishes of one engine.

    Attributes:
        rule: "replay", "rejection" or "block". None: only options of a drafter were given.
        drafter: Options of a drafter of `specdec_fast.integrations.vllm.drafters`.
    """

    rule: str | None
    drafter: Mapping[str, Any] = field(default_factory=dict)


def read_settings(additional_config: object) -> Settings | None:
    """Reads the wishes of an engine.

    Args:
        additional_config: `VllmConfig.additional_config`.

    Returns:
        The settings, or None if the engine does not ask.

    Raises:
        ValueError: If it asks for something that does not exist.
    """
    if not isinstance(additional_config, Mapping):
        return None
    if additional_config.get(KEY) is None:
        for name in get_close_matches(KEY, {str(each) for each in additional_config} - {KEY}, 1, cutoff=0.8):
            raise ValueError(f"additional_config: got {name!r}; expected {KEY!r}; write {EXAMPLE}")
        return None
    asked = additional_config[KEY]
    if not isinstance(asked, Mapping):
        raise ValueError(f"additional_config specdec: got {asked!r}; expected a mapping; write {EXAMPLE}")
    for name in asked:
        if name not in OPTIONS:
            raise ValueError(unknown_name("additional_config specdec", name, OPTIONS, or_else=f"; write {EXAMPLE}"))
    rule, options = asked.get("rule"), asked.get("drafter", {})
    if not isinstance(options, Mapping):
        raise ValueError(f"additional_config specdec drafter: got {options!r}; expected options by name")
    if rule is None and not options:
        raise ValueError(f"additional_config specdec: got no rule; expected one of {', '.join(RULES)}; write {EXAMPLE}")
    if rule is not None:
        rule = ALIASES.get(rule, rule) if isinstance(rule, str) else rule
        if rule not in RULES:
            raise ValueError(unknown_name("additional_config specdec rule", rule, RULES, or_else=f"; write {EXAMPLE}"))
    return Settings(rule, dict(options))
