"""Names that callers look up: the message for unknown names, and the former names of operators.

The former names are data, so a search for a renamed operator ends in this file.
Tests: tests/kernels/test_unknown_names.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches

RENAMED_OPERATORS = {
    "chain_verify": "rejection_verify",
    "chain_verify_logits": "rejection_verify_logits",
    "chain_thresholds": "rejection_thresholds",
    "ordered_verify": "recursive_rejection_verify",
    "ordered_thresholds": "recursive_rejection_thresholds",
    "tree_verify": "exact_match_verify",
    "law_stats": "distribution_stats",
    "draw_sample": "draft_sample",
    "edit_logits": "process_logits",
    "overlay_edits": "process_logits_overlay",
    "decoder_pass": "fused_forward",
    "row_linear": "batch_invariant_linear",
}
"""Current name of each renamed operator, by former name."""


def closest(got: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Finds the known name with the most similar spelling.

    Args:
        got: The unknown name, as the caller wrote it. Case and dashes do not count.
        known: The existing names.
        cutoff: Smallest similarity as `difflib` defines it, from 0 to 1.

    Returns:
        The name, or None if none is similar enough.
    """
    spelled = {name.lower().replace("-", "_"): name for name in known}
    near = get_close_matches(got.lower().replace("-", "_"), spelled, n=1, cutoff=cutoff)
    return spelled[near[0]] if near else None


def hint(got: object, known: Iterable[str], renamed: Mapping[str, str] | None = None, kind: str = "") -> str:
    """Suggests a name in place of an unknown one.

    Args:
        got: The unknown name, as the caller wrote it.
        known: The existing names.
        renamed: Current names by former name. Names that do not exist are not suggested.
        kind: Noun for the message about a renamed name: "rule", "operator", ...

    Returns:
        "; " and the suggestion, or "".
    """
    if not isinstance(got, str):
        return ""
    known = list(known)
    if renamed is not None and renamed.get(got) in known:
        return f"; {f'{kind} ' if kind else ''}{got!r} is now called {renamed[got]!r}"
    near = closest(got, known)
    return "" if near is None else f"; did you mean {near!r}?"


def unknown_name(
    subject: str,
    got: object,
    known: Iterable[str],
    *,
    or_else: str = "",
    renamed: Mapping[str, str] | None = None,
    kind: str = "",
) -> str:
    """Returns the error message for a name that does not exist.

    Args:
        subject: Name of the parameter, with which the message begins.
        got: The unknown name, as the caller wrote it.
        known: The existing names, in the order of the message.
        or_else: Accepted values other than names, such as ", or a BudgetPolicy".
        renamed: Current names by former name.
        kind: Noun for the message about a renamed name: "rule", "operator", ...

    Returns:
        "rule: got 'blok'; expected one of best, block, ...; did you mean 'block'?"
    """
    names = list(known)
    return f"{subject}: got {got!r}; expected one of {', '.join(names)}{or_else}{hint(got, names, renamed, kind)}"
