"""The rows of a draft model beside those of the engine. Tests: tests/drafters/test_draft_model.py."""

from __future__ import annotations

from collections.abc import Sequence

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
