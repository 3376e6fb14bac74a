"""Captured steps of an engine: programs per capacity, replayed without waiting, and what they gave, one step behind.

Owns the programs, the ring of results and which rows are published; decides nothing about requests.
Tests: tests/engine/cuda_graph/test_step_program.py.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec_fast.core.device_transfer import host_to_device, upload_values
from specdec_fast.engine.cuda_graph.step_program import Capacity, StepOutput, StepProgram
from specdec_fast.engine.drafter_runner import DrafterRunner
from specdec_fast.engine.request import Handle
from specdec_fast.engine.state import DecodeState
from specdec_fast.interfaces import CudaGraphProposals, Rule, Target
from specdec_kernels.graph_capture import GraphPool, capture, on

RING_SIZE = 4
"""Results that may be under way at once; two are."""
MAX_PROGRAMS = 32
"""Programs that are kept besides those that were prepared; the one that was not used for longest goes first."""


@dataclass(slots=True)
class _CapturedProgram:
    """A program, how to run it, its ring of results on the host, and what its inputs were last set to."""

    program: StepProgram
    run: Callable[[], None]
    ring: list[Tensor]
    inputs: tuple[list[int], list[int]] | None = None
    turns: int = 0


@dataclass(frozen=True, slots=True)
class _Pending:
    handles: dict[Handle, None]  # in the order of the results
    results: Tensor
    done: torch.cuda.Event | None


class CudaGraphRunner:
    """One step at a time is under way: `launch` starts the next, `read` answers with the one before.

    A row drafts from when it enters until there is no room for its drafts; then its drafts would go on from a text with
    gaps, so it has none until all rows have left (`suspend`) and enter again.
    """

    def __init__(
        self,
        target: Target,
        proposals: CudaGraphProposals | None,
        rule: Rule,
        state: DecodeState,
        drafter_runner: DrafterRunner,
    ) -> None:
        self._target, self._proposals, self._rule, self._state = target, proposals, rule, state
        self._drafter_runner = drafter_runner
        self._programs: dict[Capacity, _CapturedProgram] = {}  # in the order of their last use
        self._prepared: set[Capacity] = set()
        self.capacity: Capacity | None = None  # of the step that was launched last, or could not be
        self._pool = GraphPool(state.device) if state.device.type == "cuda" else None
        self._entered: set[int] = set()
        self._drafting: set[int] = set()
        self._denied: set[int] = set()
        self._pending: list[_Pending] = []
        self.memory_freed = False  # a row left since another was denied room: rows should enter anew

    def with_separate_rows(self, drafter_runner: DrafterRunner) -> CudaGraphRunner:
        """Makes captured steps that share these programs and have rows of their own, while none of these has entered.

        Args:
            drafter_runner: Proposes for the other rows.

        Returns:
            Captured steps without rows.
        """
        other = copy(self)
        other._drafter_runner = drafter_runner
        other._entered, other._drafting, other._denied, other._pending = set(), set(), set(), []
        other.memory_freed = False
        return other

    @property
    def pending(self) -> int:
        """Steps that were launched and not read."""
        return len(self._pending)

    @property
    def active(self) -> bool:
        """Whether rows are on the device's side, or steps pending."""
        return bool(self._entered or self._pending)

    @property
    def capacities(self) -> list[Capacity]:
        """What programs are there for."""
        return list(self._programs)

    def pending_steps(self, handle: Handle) -> int:
        """Pending steps that a request takes part in: each of them gives it a token, or its end."""
        return sum(handle in step.handles for step in self._pending)

    def launch(self, running: dict[int, Handle]) -> None:
        """Start a step of all running rows."""
        handles = list(running.values())
        self.capacity = None
        self._enter(running)
        asked = [
            self._drafter_runner.requested_draft_nodes(handle) if row in self._drafting else 0
            for row, handle in running.items()
        ]
        self.capacity = self._capacity(handles)
        made = self._program(self.capacity)
        self._write_inputs(made, list(running), asked)
        event = None
        with on(self._state.device):
            made.run()
            slot = made.ring[made.turns % RING_SIZE]
            made.turns += 1
            slot.copy_(made.program.results, non_blocking=True)
            if self._state.device.type == "cuda":
                event = torch.cuda.Event()
                event.record()
        self._pending.append(_Pending(dict.fromkeys(handles), slot, event))

    def read_oldest(self) -> list[tuple[Handle, StepOutput]]:
        """What the oldest pending step gave; requests that have ended since are passed over."""
        step = self._pending[0]
        if step.done is not None:
            step.done.synchronize()
        found = zip(step.handles, StepProgram.read(step.results))
        given = [(handle, got) for handle, got in found if got is not None and not handle.finished]
        del self._pending[0]
        return given

    def leave(self, row: int) -> None:
        """A row is given up; what is under way for it is forgotten with its request."""
        for rows in (self._entered, self._drafting, self._denied):
            rows.discard(row)
        self.memory_freed = bool(self._denied)
        if not self._entered:
            self._pending.clear()

    def suspend(self) -> None:
        """Rows go back to steps that are not captured; nothing may be pending. What the host knows is what counts: a
        step that failed may have stored more.
        """
        rows = sorted(self._entered)
        if self._proposals is not None:
            self._drafter_runner.leave(self._proposals, self._state, rows)
        self._state.withdraw(rows)
        stored = [self._state.length(row) - 1 for row in rows]
        at, lengths = (host_to_device(values, torch.int32, self._state.device) for values in (rows, stored))
        self._target.cache.rollback(at, lengths)
        for kept in (self._entered, self._drafting, self._denied):
            kept.clear()
        self.memory_freed = False

    def _enter(self, running: dict[int, Handle]) -> None:
        """Publish rows that are new, and find out which draft."""
        joining = [row for row in running if row not in self._entered]
        self._state.publish(joining)
        self._entered.update(joining)
        if self._proposals is None:
            return
        hopeful = [row for row in running if row in self._drafting or row in joining]
        wanted = [row for row in hopeful if self._drafter_runner.requested_draft_nodes(running[row])]
        roomy = [row for row in wanted if self._reserve(self._proposals, running[row])]
        self._denied.update(set(wanted).difference(roomy))
        new = [row for row in roomy if row in joining]
        entered = self._drafter_runner.enter(self._proposals, self._state, new) if new else []
        self._drafting = self._drafting.intersection(roomy).union(entered)

    def _reserve(self, proposals: CudaGraphProposals, handle: Handle) -> bool:
        """Room in the draft's cache for the step to come, whatever the steps under way accept."""
        assert handle.row is not None
        count = self._drafter_runner.requested_draft_nodes(handle)
        ahead = min(self.pending_steps(handle) * (count + 1) + count, handle.remaining)
        return self._drafter_runner.reserve(proposals, handle.row, self._state.length(handle.row) + ahead)

    def prepare(self, rows: int, num_draft_tokens: int, all_greedy: bool) -> None:
        """Makes the program of a batch, if it is not there. It is kept for as long as the engine.

        Args:
            rows: Requests of the batch.
            num_draft_tokens: The most draft tokens that one of them asks for.
            all_greedy: Whether all of them are at temperature 0.
        """
        self.capacity = Capacity(self._rows(rows), self._nodes(num_draft_tokens), all_greedy)
        self._program(self.capacity)
        self._prepared.add(self.capacity)

    def _rows(self, count: int) -> int:
        return min(1 << (count - 1).bit_length(), self._state.max_rows)

    def _nodes(self, asked: int) -> int:
        """Nodes of a row, the root included, of a program for requests that ask for so many draft tokens: rounded up to
        a power of two, but not beyond what requests ask for by default.
        """
        usual = self._drafter_runner.num_draft_tokens
        return 1 + (min(1 << (asked - 1).bit_length(), usual) if 0 < asked <= usual else asked)

    def _capacity(self, handles: list[Handle]) -> Capacity:
        """What a program must have room for. A text near its end has room for fewer drafts in every step: that takes a
        smaller program where there is one, and never makes one. A program that is wider than these requests ask for,
        made for others on the way, does not serve them: its target passes would cost more. One that was prepared does.
        """
        rows = self._rows(len(handles))
        greedy = all(handle.params.temperature == 0 for handle in handles)
        asked = [self._drafter_runner.requested_draft_nodes(handle) for handle in handles]
        if not any(asked):
            return Capacity(rows, 1, greedy)
        left = [handle.remaining - self.pending_steps(handle) for handle in handles]
        needed = 1 + max(min(count, room - 1) for count, room in zip(asked, left, strict=True))
        usual = self._nodes(max(asked))
        widest = max(usual, 1 + self._drafter_runner.num_draft_tokens)
        captured = [each for each in self._programs if (each.rows, each.all_greedy) == (rows, greedy)]
        fitting = [each.nodes for each in captured if each.nodes <= widest or each in self._prepared]
        return Capacity(rows, min((nodes for nodes in fitting if nodes >= needed), default=usual), greedy)

    def _program(self, capacity: Capacity) -> _CapturedProgram:
        made = self._programs.pop(capacity, None)
        if made is None:
            program = StepProgram(capacity, self._target, self._proposals, self._rule, self._state)
            pinned = self._state.device.type == "cuda"
            ring = [torch.zeros(program.results.shape, dtype=torch.int64, pin_memory=pinned) for _ in range(RING_SIZE)]
            run = capture(program, self._state.device, self._pool)  # without live rows it changes nothing
            made = _CapturedProgram(program, run, ring)
        self._programs[capacity] = made
        evictable = [each for each in self._programs if each not in self._prepared]
        if len(evictable) > MAX_PROGRAMS:
            del self._programs[evictable[0]]
        return made

    def _write_inputs(self, made: _CapturedProgram, rows: list[int], asked: list[int]) -> None:
        """The inputs of the program, if they are not what they were; places to spare get rows that nobody uses. How
        many drafts a text has room for is not among them: the device knows.
        """
        if made.inputs == (rows, asked):
            return
        spare = made.program.capacity.rows - len(rows)
        free = [row for row in range(self._state.max_rows) if row not in set(rows)][:spare]
        made.inputs = None  # unknown, should this be interrupted
        upload_values([*rows, *free], made.program.rows)
        upload_values([True] * len(rows) + [False] * spare, made.program.live)
        upload_values([*asked, *[0] * spare], made.program.max_draft_nodes)
        made.inputs = rows, asked
