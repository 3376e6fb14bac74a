"""Commands that messages suggest, quoted so that a shell runs them as they are.

Tests: tests/core/test_shell_commands.py, tests/commands/test_printed_commands.py.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

PROMPT = "Once upon a time"
"""Prompt of suggested commands."""


def generate_command(options: Mapping[str, Any], drafter_options: Mapping[str, Any]) -> str:
    """Returns a `specdec generate` command line with an example prompt.

    Args:
        options: Values by flag, such as "--model". None, False and "" leave a flag out; True is a flag without value.
        drafter_options: Options of the drafter by name.

    Returns:
        The command, quoted for a POSIX shell.
    """
    words = ["specdec", "generate", PROMPT]
    for flag, value in options.items():
        if value is True:
            words.append(flag)
        elif value not in (None, False, ""):
            words += [flag, str(value)]
    for name, value in drafter_options.items():
        words += ["-o", f"{name}={_option_text(value)}"]
    return shlex.join(words)


def _option_text(value: Any) -> str:
    """Formats a value so that `-o NAME=VALUE` reads the same value: as text if that is no JSON, else as JSON."""
    if not isinstance(value, str):
        return json.dumps(value)
    try:
        json.loads(value)
    except ValueError:
        return value
    return json.dumps(value)
