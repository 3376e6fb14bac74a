"""What a request cost and what speculation gained: counters, tau, alpha per position, time per verb.

Tests: tests/engine/test_stats.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter

PHASES = ("prefill", "propose", "plan", "score", "verify", "commit", "append", "observe")


class Clock:
    """Seconds per verb of one step. `with clock.time(verb)` adds to a verb's; verbs do not nest."""

    __slots__ = ("_start", "_verb", "seconds")

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)

    def time(self, verb: str) -> Clock:
        self._verb = verb
        return self

    def __enter__(self) -> None:
        self._start = perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds[self._verb] += perf_counter() - self._start

    @property
    def verifying(self) -> float:
        """Seconds of a step from its plan to the committed tokens."""
        return sum(self.seconds[verb] for verb in ("plan", "score", "verify", "commit", "append"))


@dataclass(slots=True)
class RequestStats:
    """Counters of one request.

    steps: target passes; new_tokens: tokens kept; tested[i], accepted[i]: how often the draft token at depth i + 1 was
    reached by the walk, and kept by it; seconds: time per verb of the steps the request took part in (shared with
    the rest of its batch); preemptions: how often it was evicted and recomputed; faults: how often its drafter raised
    while it worked on the request, which then went on without drafts.
    """

    steps: int = 0
    new_tokens: int = 0
    num_draft_tokens: int = 0
    tested: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)
    preemptions: int = 0
    faults: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    def record_step(self, drafted: int, depth: int, accepted: int, kept: int) -> None:
        """One step: `drafted` nodes of a tree `depth` deep, `accepted` kept by the rule, `kept` tokens emitted."""
        self.steps += 1
        self.num_draft_tokens += drafted
        self.new_tokens += kept
        reached = min(accepted + 1, depth)
        while len(self.tested) < reached:
            self.tested.append(0)
            self.accepted_per_position.append(0)
        for position in range(reached):
            self.tested[position] += 1
        for position in range(accepted):
            self.accepted_per_position[position] += 1

    @property
    def num_accepted(self) -> int:
        """Draft tokens that the rule accepted, at all positions together."""
        return sum(self.accepted_per_position)

    @property
    def tau(self) -> float:
        """Tokens per target pass."""
        return self.new_tokens / self.steps if self.steps else 0.0

    @property
    def alpha(self) -> list[float]:
        """Acceptance rate at each depth, of the tokens that were reached there."""
        return [hit / seen for hit, seen in zip(self.accepted_per_position, self.tested)]

    @property
    def mean_alpha(self) -> float:
        """Acceptance rate over all tested tokens; 0 when none was tested."""
        return self.num_accepted / sum(self.tested) if any(self.tested) else 0.0

    def merge(self, other: RequestStats) -> None:
        """Add another request's counters."""
        self.steps += other.steps
        self.new_tokens += other.new_tokens
        self.num_draft_tokens += other.num_draft_tokens
        self.preemptions += other.preemptions
        self.faults += other.faults
        for mine, theirs in ((self.tested, other.tested), (self.accepted_per_position, other.accepted_per_position)):
            mine.extend([0] * (len(theirs) - len(mine)))
            for position, count in enumerate(theirs):
                mine[position] += count
        for verb, seconds in other.seconds.items():
            self.seconds[verb] += seconds

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {
            "steps": self.steps,
            "new_tokens": self.new_tokens,
            "num_draft_tokens": self.num_draft_tokens,
            "tau": self.tau,
            "alpha": self.mean_alpha if any(self.tested) else None,
            "alpha_per_position": self.alpha,
            "preemptions": self.preemptions,
            "faults": self.faults,
            "seconds": dict(self.seconds),
        }
