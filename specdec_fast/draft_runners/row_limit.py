"""The rows of a draft model beside those of the engine. Tests: tests/drafters/test_draft_model.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specdec_fast.targets.huggingface import HuggingFaceTarget


def check_row_limit(drafter: str, rows: Sequence[int], model: HuggingFaceTarget) -> None:
    """Checks that a draft model has the rows of the requests that join.

    Args:
        drafter: Name of the drafter, for the message.
        rows: Rows of the engine.
        model: The draft model.

    Raises:
        ValueError: If the draft model has fewer rows than the engine.
    """
    max_rows = model.cache.max_rows
    if max(rows) >= max_rows:
        raise ValueError(
            f"{drafter}: got row {max(rows)} of the engine and a draft with room for {max_rows} rows; expected "
            "at least as many as the target has; build the draft with the target's max_rows"
        )


def check_rollback(drafter: str, model: Any) -> None:
    """Checks that the model that drafts can drop tokens that were rejected.

    Args:
        drafter: Name of the drafter, for the message.
        model: The model that drafts.

    Raises:
        ValueError: If its cache cannot be rolled back.
    """
    reason = getattr(getattr(model, "cache", None), "why_no_rollback", None)
    if reason is not None:
        name = type(getattr(model, "model", model)).__name__
        raise ValueError(
            f"{drafter}: got a {name} that drafts, but {reason}; expected attention layers only; draft with another "
            "model, or with a drafter that needs none (such as ngram or suffix)"
        )
