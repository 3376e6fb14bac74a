"""Statistics of requests: counters, tau, acceptance rates, and seconds per phase of a step.

Tests: tests/engine/test_stats.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter

PHASES = ("prefill", "propose", "plan", "score", "verify", "commit", "append", "observe")


class Clock:
    """Measures the phases of one step: `with clock.time(phase)` adds to the seconds of a phase. Phases do not nest.

    Attributes:
        seconds: Wall-clock seconds per phase.
    """

    __slots__ = ("_phase", "_start", "seconds")

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)

    def time(self, phase: str) -> Clock:
        """Selects the phase that the next `with` block measures."""
        self._phase = phase
        return self

    def __enter__(self) -> None:
        self._start = perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds[self._phase] += perf_counter() - self._start

    @property
    def verifying(self) -> float:
        """Seconds of a step from its plan to the committed tokens."""
        return sum(self.seconds[phase] for phase in ("plan", "score", "verify", "commit", "append"))


@dataclass(slots=True)
class RequestStats:
    """Counters of one request, or of several after `merge`.

    Draft tokens behind the end of a text count as proposed, but neither as tested nor as accepted.

    Attributes:
        steps: Target passes.
        new_tokens: Generated tokens.
        num_draft_tokens: Draft tokens that were proposed; nodes of a tree count one each.
        tested: At index i, how many draft tokens at depth i + 1 the rule tested.
        accepted_per_position: At index i, how many draft tokens at depth i + 1 the rule accepted.
        preemptions: How many times the request was preempted and recomputed.
        cached_tokens: Prompt tokens whose keys and values were shared with an earlier request.
        faults: How many times the drafter raised while it worked on the request, which then continued without drafts.
            A head or a draft model that proposes nothing in the first steps of a request counts once.
        seconds: Wall-clock seconds per phase of the steps that the request took part in. The requests of a batch share
            them.
    """

    steps: int = 0
    new_tokens: int = 0
    num_draft_tokens: int = 0
    tested: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)
    preemptions: int = 0
    faults: int = 0
    cached_tokens: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    def record_step(self, drafted: int, depth: int, accepted: int, kept: int) -> None:
        """Counts one step.

        Args:
            drafted: Draft tokens that were proposed.
            depth: Depth of the deepest draft token that could be tested.
            accepted: Draft tokens that the rule accepted.
            kept: Tokens that the text kept. Fewer than `accepted + 1` if it ended inside the step.
        """
        self.steps += 1
        self.num_draft_tokens += drafted
        self.new_tokens += kept
        accepted, reached = min(accepted, kept), min(accepted + 1, depth, kept)
        while len(self.tested) < reached:
            self.tested.append(0)
            self.accepted_per_position.append(0)
        for position in range(reached):
            self.tested[position] += 1
        for position in range(accepted):
            self.accepted_per_position[position] += 1

    @property
    def num_accepted(self) -> int:
        """Draft tokens that the rule accepted, at all depths."""
        return sum(self.accepted_per_position)

    @property
    def tau(self) -> float:
        """Tokens per target pass."""
        return self.new_tokens / self.steps if self.steps else 0.0

    @property
    def alpha(self) -> float:
        """Acceptance rate among all tested draft tokens; 0 if none was tested."""
        return self.num_accepted / sum(self.tested) if any(self.tested) else 0.0

    @property
    def alpha_per_position(self) -> list[float]:
        """Acceptance rate at each depth, among the draft tokens that were tested there."""
        return [accepted / tested for accepted, tested in zip(self.accepted_per_position, self.tested)]

    def merge(self, other: RequestStats) -> None:
        """Adds the counters of another request."""
        self.steps += other.steps
        self.new_tokens += other.new_tokens
        self.num_draft_tokens += other.num_draft_tokens
        self.preemptions += other.preemptions
        self.faults += other.faults
        self.cached_tokens += other.cached_tokens
        for mine, theirs in ((self.tested, other.tested), (self.accepted_per_position, other.accepted_per_position)):
            mine.extend([0] * (len(theirs) - len(mine)))
            for position, count in enumerate(theirs):
                mine[position] += count
        for phase, seconds in other.seconds.items():
            self.seconds[phase] += seconds

    def as_dict(self) -> dict[str, object]:
        """Returns the values for JSON."""
        return {
            "steps": self.steps,
            "new_tokens": self.new_tokens,
            "num_draft_tokens": self.num_draft_tokens,
            "tau": self.tau,
            "alpha": self.alpha if any(self.tested) else None,
            "alpha_per_position": self.alpha_per_position,
            "preemptions": self.preemptions,
            "faults": self.faults,
            "cached_tokens": self.cached_tokens,
            "seconds": dict(self.seconds),
        }
