"""Checks that a logits processor of a user is a function of one text, before it runs at every node of a draft.

Tests: tests/integrations/transformers/test_processor_checks.py.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

_VALUES = (bool, int, float, complex, str, bytes)
_SEQUENCES = (list, deque)
_COLLECTIONS = (dict, set)


class StateRecord:
    """The plain attributes of an object: numbers, texts, and the contents of lists and dicts.

    Args:
        owner: Any object. One without a `__dict__` has an empty record.
    """

    def __init__(self, owner: object) -> None:
        self._owner = owner
        self._kept: dict[str, Any] = {}
        for name, value in getattr(owner, "__dict__", {}).items():
            if type(value) in _VALUES:
                self._kept[name] = value
            elif type(value) in (*_SEQUENCES, *_COLLECTIONS):
                self._kept[name] = value.copy()

    def find_change(self) -> str | None:
        """Returns the name of an attribute that has another value or another number of entries now, or None."""
        present = getattr(self._owner, "__dict__", {})
        for name, kept in self._kept.items():
            value: Any = present.get(name)
            if type(value) is not type(kept):
                return name
            if (len(value) != len(kept)) if type(kept) not in _VALUES else value != kept:
                return name
        return None

    def restore(self) -> None:
        """Gives the attributes the recorded values and contents back."""
        present = getattr(self._owner, "__dict__", {})
        for name, kept in self._kept.items():
            value: Any = present.get(name)
            if type(kept) in _VALUES or type(value) is not type(kept):
                present[name] = kept
            elif type(kept) in _SEQUENCES:
                value.clear()
                value.extend(kept)
            else:
                value.clear()
                value.update(kept)


def why_no_function_of_text(processor: Any, input_ids: Tensor, vocab_size: int) -> str | None:
    """Tries a processor on the prompts, with scores that are made up.

    It is called on all rows at once, as transformers does, and then on each row alone, as an engine does. Results must
    agree, and the second calls must leave counters, lists and dicts as the first one left them.

    Args:
        processor: The processor.
        input_ids: Prompts with their padding, int64 [B, n].
        vocab_size: V.

    Returns:
        What was found, or None. A processor for which something was found has its plain attributes back.
    """
    from transformers import LogitsProcessorList

    name = getattr(processor, "__qualname__", None) or type(processor).__name__
    first = StateRecord(processor)
    call: Any = LogitsProcessorList([processor])
    numbers = torch.arange(input_ids.shape[0] * vocab_size, device=input_ids.device, dtype=torch.float64)
    scores = torch.sin(numbers * 12.9898).mul(3).float().view(-1, vocab_size)
    together = call(input_ids.clone(), scores.clone())
    reason = why_no_scores(together, scores)
    if reason is not None:
        first.restore()
        return f"logits processor {name}, which {reason}"
    after, found, raised = StateRecord(processor), None, False
    for row in range(input_ids.shape[0]):
        try:
            alone = call(input_ids[row : row + 1].clone(), scores[row : row + 1].clone())
            same = _equal(alone[0], together[row])
        except Exception as error:  # whatever it is, a second call on this text is not possible
            raised = True
            words = ": ".join([type(error).__name__, *str(error).splitlines()[:1]])
            found = f"logits processor {name}, which raises {words} if it is called again, on row {row} alone"
            break
        if not same:
            found = f"logits processor {name}, whose scores of row {row} differ if it is called on that row alone"
            break
    changed = after.find_change()
    if changed is not None and not raised:
        found = f"logits processor {name}, whose attribute {changed!r} changes when it is called"
    if found is None:
        return None
    first.restore()
    return (
        f"{found}; expected a function of one text and its scores, because it is called for every node of a draft "
        "(attach(check_processors=False) skips this check)"
    )


def why_no_scores(found: Any, given: Tensor) -> str | None:
    """Returns what a processor returned and what was expected, if it returned no scores of the shape that it got."""
    if isinstance(found, Tensor) and found.shape == given.shape:
        return None
    got = [*found.shape] if isinstance(found, Tensor) else type(found).__name__
    return f"returned {got}; expected scores {[*given.shape]}, as it was given"


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether scores agree but for rounding."""
    return one.shape == other.shape and torch.allclose(one.float(), other.float(), 1e-4, 1e-4, equal_nan=True)
