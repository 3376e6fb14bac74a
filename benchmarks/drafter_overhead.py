"""Time of a drafter's methods without the passes of models inside, as a share of the engine's steps."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

VERBS = ("begin", "propose", "observe")
PASSES = (("model", "_run"), ("model", "logits"), ("model", "features"), ("heads", "forward"))
"""Methods that run passes: (attribute of the drafter, method)."""


class DraftClock:
    """Sums the seconds of an engine's steps, of its drafter's methods, and of the passes inside these."""

    def __init__(self, engine: Any) -> None:
        self.step = self.drafting = self.passes = 0.0
        self._inside = 0
        drafter = engine.drafter
        for verb in VERBS:
            setattr(drafter, verb, self._timed(getattr(drafter, verb), "drafting"))
        holders = [(engine.target, "_run")]
        for each in [drafter, *getattr(drafter, "sources", ())]:
            holders += [(getattr(each, attribute, None), method) for attribute, method in PASSES]
        for holder, method in holders:
            if hasattr(holder, method):
                setattr(holder, method, self._timed(getattr(holder, method), "passes"))
        engine.step = self._timed(engine.step, "step")

    @property
    def share(self) -> float:
        """Time of drafting outside of passes, as a share of the steps."""
        return (self.drafting - self.passes) / self.step if self.step else 0.0

    def _timed(self, run: Callable[..., Any], what: str) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            if what == "passes" and not self._inside:
                return run(*args, **options)
            self._inside += what == "drafting"
            start = perf_counter()
            try:
                return run(*args, **options)
            finally:
                setattr(self, what, getattr(self, what) + perf_counter() - start)
                self._inside -= what == "drafting"

        return timed
