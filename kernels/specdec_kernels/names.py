"""Names that callers look up: one message for unknown names, and the operators' former names.

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
"""Former name -> name of each operator that was renamed."""


def closest(got: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Returns the known name that is spelled most like this one, or None.

    Args:
        got: The unknown name, as the caller wrote it; case and dashes do not count.
        known: The names that exist.
        cutoff: Least similarity, from 0 to 1, as `difflib` counts it.
    """
    spelled = {name.lower().replace("-", "_"): name for name in known}
    near = get_close_matches(got.lower().replace("-", "_"), spelled, n=1, cutoff=cutoff)
    return spelled[near[0]] if near else None


def hint(got: object, known: Iterable[str], renamed: Mapping[str, str] | None = None, kind: str = "") -> str:
    """Returns "; " and what an unknown name probably means, or "".

    Args:
        got: The unknown name, as the caller wrote it.
        known: The names that exist.
        renamed: Former name -> name; one that is not known is not recommended.
        kind: What is looked up, for the message about a renamed one: "rule", "operator", ...
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
    """Returns the message of the error for a name that does not exist.

    Args:
        subject: The parameter that was given, with which the message begins.
        got: The unknown name, as the caller wrote it.
        known: The names that exist, in the order in which they are listed.
        or_else: What may be given instead of a name: ", or a BudgetPolicy".
        renamed: Former name -> name.
        kind: What is looked up, where `renamed` is given: "rule", "operator", ...

    Returns:
        "rule: got 'blok'; expected one of best, block, ...; did you mean 'block'?"
    """
    names = list(known)
    return f"{subject}: got {got!r}; expected one of {', '.join(names)}{or_else}{hint(got, names, renamed, kind)}"
