"""Finds drafters that are loaded but never draft: they would slow every step, and nothing else would show it.

A drafter that reads hidden states or runs a model has a proposal in every step. If it has none step after step, it is
broken: it reads the wrong layers, or its cache has no memory. Look-ups may find nothing, which is no failure.
Tests: tests/engine/test_empty_drafts.py.
"""

from __future__ import annotations

import logging

from specdec_fast.engine.request import Handle
from specdec_fast.interfaces import Drafter

log = logging.getLogger("specdec_fast")

EMPTY_STEPS = 8
"""Steps without any draft token after which a drafter counts as broken. The first token of a text needs one."""


class EmptyDrafts:
    """Counts steps in which a drafter might have drafted and did not.

    Args:
        drafter: The drafter, or None.
    """

    def __init__(self, drafter: Drafter | None) -> None:
        needs = None if drafter is None else drafter.needs
        self._name = getattr(drafter, "name", "")
        self._has_model = needs is not None and bool(needs.own_cache or needs.partial_layers or needs.aux_hidden_states)
        self._steps: dict[Handle, int] = {}
        self._steps_of_all = 0  # of requests that ended early too, until the drafter drafts for the first time
        self._has_drafted = self._is_logged = False

    def is_fault(self, handle: Handle, drafted: int) -> bool:
        """Counts one step of a request.

        Args:
            handle: The request.
            drafted: Draft tokens of this step, in which at least one was allowed.

        Returns:
            Whether the drafter has failed on this request. True at most once for each request.
        """
        if not self._has_model:
            return False
        if drafted or handle.stats.num_draft_tokens:
            self._has_drafted |= bool(drafted)
            self._steps.pop(handle, None)
            return False
        if handle.params.grammar is not None or handle.params.allowed_token_ids is not None:
            return False  # a head over part of the vocabulary may know none of the tokens that are allowed
        count = self._steps.get(handle, 0)
        if count >= EMPTY_STEPS:
            return False
        self._steps_of_all += 1
        never = not self._has_drafted and self._steps_of_all >= EMPTY_STEPS
        self._steps[handle] = EMPTY_STEPS if never else count + 1
        if self._steps[handle] < EMPTY_STEPS:
            return False
        if not self._is_logged:
            self._is_logged = True
            log.warning(
                "drafter %s drafted nothing in %d steps, although it might have; the text is not affected, and this is "
                "logged once; check that its head or draft model belongs to the target and that its cache has memory, "
                "or choose another drafter",
                *(self._name, EMPTY_STEPS),
            )
        return True

    def forget_finished(self) -> None:
        """Drops the counts of requests that have ended."""
        if self._steps:
            self._steps = {handle: count for handle, count in self._steps.items() if not handle.finished}
