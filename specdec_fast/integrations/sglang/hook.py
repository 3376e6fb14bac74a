"""The hook on SGLang's `eagle_sample`: what it replaces, and which versions have it.

Tests: tests/integrations/test_sglang.py, tests/integrations/test_sglang_package.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module, metadata
from typing import Any

from specdec_fast.core.former_names import RENAMED_RULES
from specdec_fast.integrations.sglang.tree_sampler import TreeSampler
from specdec_kernels.unknown_names import unknown_name

RULES = ("replay", "recursive_rejection", "traversal")
"""Values of `SPECDEC_SGLANG_RULE`."""

SUPPORTED = "0.5.23"
"""The version of SGLang whose function and tensors this plugin knows."""

MODULE, FUNCTION = "sglang.srt.speculative.eagle_utils", "eagle_sample"
PARAMETERS = (
    "verify_input",
    "batch",
    "logits_output",
    "grammar_mask",
    "uno_target_max_top_k",
    "watermark_state",
    "watermark_full_mask",
)
"""Parameters of the function in that version."""


class RefusalError(RuntimeError):
    """The plugin cannot serve this SGLang. The message says why, and what to do."""


def check_rule(rule: str) -> None:
    """Checks the name of a rule.

    Args:
        rule: The value of `SPECDEC_SGLANG_RULE`.

    Raises:
        RefusalError: If it is none of `RULES`.
    """
    if rule not in RULES:
        raise RefusalError(unknown_name("SPECDEC_SGLANG_RULE", rule, RULES, renamed=RENAMED_RULES, kind="rule"))


def check_version(got: str) -> None:
    """Checks the version of SGLang.

    Args:
        got: Its version.

    Raises:
        RefusalError: If it is another than `SUPPORTED`. Releases after it with a suffix, such as "0.5.23.post1", are
            the same.
    """
    release = got.partition("+")[0].partition(".post")[0]
    if release != SUPPORTED:
        raise RefusalError(
            f"got sglang {got}; expected {SUPPORTED}, whose tensors it knows; install that version, or unset "
            "SPECDEC_SGLANG_RULE"
        )


def check_function(function: Callable[..., Any]) -> None:
    """Checks that a function takes what `eagle_sample` takes.

    Args:
        function: The function.

    Raises:
        RefusalError: If it has other parameters.
    """
    got = tuple(inspect.signature(function).parameters)
    if got != PARAMETERS:
        raise RefusalError(
            f"got {FUNCTION}({', '.join(got)}); expected ({', '.join(PARAMETERS)}) as in sglang {SUPPORTED}; install "
            "that version unpatched, or unset SPECDEC_SGLANG_RULE"
        )


def install(rule: str) -> None:
    """Registers a `TreeSampler` around `eagle_sample`. SGLang applies it after its plugins were loaded.

    Args:
        rule: One of `RULES`.

    Raises:
        RefusalError: If the rule, the version of SGLang or its function is another, or if another plugin has a hook on
            the function.
    """
    check_rule(rule)
    check_version(metadata.version("sglang"))
    registry = import_module("sglang.srt.plugins.hook_registry")
    target = f"{MODULE}.{FUNCTION}"
    if getattr(registry.HookRegistry, "_hooks", {}).get(target):
        raise RefusalError(
            f"got another hook on {target}; expected none, since only one of two plugins can verify; choose by "
            "SGLANG_PLUGINS, or unset SPECDEC_SGLANG_RULE"
        )
    check_function(getattr(import_module(MODULE), FUNCTION))
    registry.HookRegistry.register(target, TreeSampler(rule), registry.HookType.AROUND)
