"""Runs CUDA-graph steps: one program per capacity, replayed without waiting, with the host one step behind.

Owns the programs, their result buffers, and which rows are published. It decides nothing about requests.

Tests: tests/engine/cuda_graph/test_step_program.py, tests/launch/test_capture.py.
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
"""Result buffers of a program. At most two are in use at once."""
MAX_PROGRAMS = 32
"""Programs that are kept, besides the prepared ones. The least recently used one is dropped first."""


@dataclass(slots=True)
class _CapturedProgram:
    """A program with its result buffers on the host, and the inputs that were last written."""

    program: StepProgram
    run: Callable[[], None]
    ring: list[Tensor]
    inputs: tuple[list[int], list[int]] | None = None
    num_runs: int = 0


@dataclass(frozen=True, slots=True)
class _PendingStep:
    """A step that was launched and not read."""

    handles: dict[Handle, None]  # in the order of the results
    results: Tensor
    done: torch.cuda.Event | None


class CudaGraphRunner:
    """Runs the CUDA-graph steps of an engine: `launch` starts a step, `read_oldest` returns the one before.

    A row drafts from the step in which it enters until the draft's cache has no memory for it. Later drafts would
    continue a text with gaps, so the row drafts again only after all rows have left (`suspend`) and entered again.

    Args:
        target: The model that scores drafts.
        proposals: Proposals of the drafter, or None for plain decoding.
        rule: The verification rule.
        state: The decode state of the engine.
        drafter_runner: The drafter with its budget.

    Attributes:
        capacity: Capacity of the step that was launched last, or could not be launched; None if it is unknown.
        memory_freed: Whether a row has left since another was denied memory, so that rows should enter again.
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
        self.capacity: Capacity | None = None
        self._pool = GraphPool(state.device) if state.device.type == "cuda" else None
        self._entered: set[int] = set()
        self._drafting: set[int] = set()
        self._denied: set[int] = set()
        self._pending: list[_PendingStep] = []
        self.memory_freed = False

    def with_separate_rows(self, drafter_runner: DrafterRunner) -> CudaGraphRunner:
        """Returns a runner that shares these programs and has rows of its own. No row of this one may have entered.

        Args:
            drafter_runner: Proposes for the rows of the result.
        """
        other = copy(self)
        other._drafter_runner = drafter_runner
        other._entered, other._drafting, other._denied, other._pending = set(), set(), set(), []
        other.memory_freed = False
        return other

    @property
    def pending(self) -> int:
        """Number of steps that were launched and not read."""
        return len(self._pending)

    @property
    def active(self) -> bool:
        """Whether rows have entered or steps are pending."""
        return bool(self._entered or self._pending)

    @property
    def capacities(self) -> list[Capacity]:
        """Capacities of the programs that exist."""
        return list(self._programs)

    def pending_steps(self, handle: Handle) -> int:
        """Returns the pending steps that a request takes part in. Each adds at least one token or ends the request."""
        return sum(handle in step.handles for step in self._pending)

    def launch(self, running: dict[int, Handle]) -> None:
        """Starts a step of all running requests.

        Args:
            running: Requests by row.
        """
        handles = list(running.values())
        self.capacity = None
        self._enter(running)
        requested = [
            self._drafter_runner.requested_draft_nodes(handle) if row in self._drafting else 0
            for row, handle in running.items()
        ]
        self.capacity = self._choose_capacity(handles)
        made = self._get_program(self.capacity)
        self._write_inputs(made, list(running), requested)
        event = None
        with on(self._state.device):
            made.run()
            results = made.ring[made.num_runs % RING_SIZE]
            made.num_runs += 1
            results.copy_(made.program.results, non_blocking=True)
            if self._state.device.type == "cuda":
                event = torch.cuda.Event()
                event.record()
        self._pending.append(_PendingStep(dict.fromkeys(handles), results, event))

    def read_oldest(self) -> list[tuple[Handle, StepOutput]]:
        """Waits for the oldest pending step and returns its outputs, without those of requests that have ended."""
        step = self._pending[0]
        if step.done is not None:
            step.done.synchronize()
        read = zip(step.handles, StepProgram.read(step.results))
        outputs = [(handle, output) for handle, output in read if output is not None and not handle.finished]
        del self._pending[0]
        for handle, output in outputs:
            if handle.row in self._drafting and handle.remaining > 1:
                self._drafter_runner.record_draft_size(handle, output.num_draft_tokens)
        return outputs

    def leave(self, row: int) -> None:
        """Removes a row. Outputs of pending steps for its request are ignored."""
        for rows in (self._entered, self._drafting, self._denied):
            rows.discard(row)
        self.memory_freed = bool(self._denied)
        if not self._entered:
            self._pending.clear()

    def suspend(self, failed: bool = False) -> list[int]:
        """Returns all rows to `sync` steps. No step may be pending.

        Caches are rolled back to the host's texts, since a step that failed may have stored more.

        Args:
            failed: A launch has failed, so that states of recurrent layers may have moved without their lengths.

        Returns:
            Rows whose cache cannot go back so far. They must be computed again.
        """
        rows = sorted(self._entered)
        if self._proposals is not None:
            self._drafter_runner.leave(self._proposals, self._state, rows)
        self._state.withdraw(rows)
        stored = [self._state.length(row) - 1 for row in rows]
        lost = self._lost_rows(rows, stored, failed)
        if not lost:
            at, lengths = (host_to_device(values, torch.int32, self._state.device) for values in (rows, stored))
            self._target.cache.rollback(at, lengths)
        for kept in (self._entered, self._drafting, self._denied):
            kept.clear()
        self.memory_freed = False
        return lost

    def _lost_rows(self, rows: list[int], lengths: list[int], failed: bool) -> list[int]:
        """Rows that may hold more than these lengths in a cache that cannot be rolled back."""
        cache = self._target.cache
        if not rows or getattr(cache, "why_no_rollback", None) is None:
            return []
        if failed:
            return rows
        held = cache.lengths[host_to_device(rows, torch.int64, self._state.device)].tolist()
        return [row for row, length, found in zip(rows, lengths, held, strict=True) if found != length]

    def prepare(self, rows: int, num_draft_tokens: int, all_greedy: bool) -> None:
        """Captures the program of a batch if it does not exist. It is kept for the life of the engine.

        Args:
            rows: Requests of the batch.
            num_draft_tokens: The most draft tokens that one of them asks for.
            all_greedy: Whether all of them are at temperature 0.
        """
        self.capacity = Capacity(self._row_capacity(rows), self._node_capacity(num_draft_tokens), all_greedy)
        self._get_program(self.capacity)
        self._prepared.add(self.capacity)

    def _enter(self, running: dict[int, Handle]) -> None:
        """Publishes new rows, and decides which rows draft."""
        joining = [row for row in running if row not in self._entered]
        self._state.publish(joining)
        self._entered.update(joining)
        if self._proposals is None:
            return
        eligible = [row for row in running if row in self._drafting or row in joining]
        wanted = [row for row in eligible if self._drafter_runner.requested_draft_nodes(running[row])]
        reserved = [row for row in wanted if self._reserve(self._proposals, running[row])]
        self._denied.update(set(wanted).difference(reserved))
        new = [row for row in reserved if row in joining]
        entered = self._drafter_runner.enter(self._proposals, self._state, new) if new else []
        self._drafting = self._drafting.intersection(reserved).union(entered)

    def _reserve(self, proposals: CudaGraphProposals, handle: Handle) -> bool:
        """Reserves memory of the drafter for the next step, whatever pending steps accept."""
        assert handle.row is not None
        count = self._drafter_runner.requested_draft_nodes(handle)
        new = min(self.pending_steps(handle) * (count + 1) + count, handle.remaining)
        return self._drafter_runner.reserve(proposals, handle.row, self._state.length(handle.row) + new)

    def _row_capacity(self, count: int) -> int:
        """Rows of a program for `count` requests: a power of two, or all rows."""
        return min(1 << (count - 1).bit_length(), self._state.max_rows)

    def _node_capacity(self, requested: int) -> int:
        """Nodes per row, root included: draft tokens up to the drafter's default are rounded up to a power of two."""
        default = self._drafter_runner.num_draft_tokens
        return 1 + (min(1 << (requested - 1).bit_length(), default) if 0 < requested <= default else requested)

    def _choose_capacity(self, handles: list[Handle]) -> Capacity:
        """The capacity of the next step."""
        # Texts near their ends need fewer draft tokens in every step. They use an existing smaller program; none is
        # captured for them. A program that is wider than these requests ask for is used only if it was prepared,
        # because its target passes cost more.
        rows = self._row_capacity(len(handles))
        greedy = all(handle.params.temperature == 0 for handle in handles)
        requested = [self._drafter_runner.requested_draft_nodes(handle) for handle in handles]
        if not any(requested):
            return Capacity(rows, 1, greedy)
        left = [handle.remaining - self.pending_steps(handle) for handle in handles]
        needed = 1 + max(min(count, tokens - 1) for count, tokens in zip(requested, left, strict=True))
        usual = self._node_capacity(max(requested))
        widest = max(usual, 1 + self._drafter_runner.num_draft_tokens)
        existing = [each for each in self._programs if (each.rows, each.all_greedy) == (rows, greedy)]
        fitting = [each.nodes for each in existing if each.nodes <= widest or each in self._prepared]
        return Capacity(rows, min((nodes for nodes in fitting if nodes >= needed), default=usual), greedy)

    def _get_program(self, capacity: Capacity) -> _CapturedProgram:
        """The program of a capacity, captured now if it does not exist."""
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

    def _write_inputs(self, made: _CapturedProgram, rows: list[int], requested: list[int]) -> None:
        """Writes the inputs of a program if they have changed. Spare places get rows that are not in use.

        The end of a text is no input: the device knows how many drafts it leaves.
        """
        if made.inputs == (rows, requested):
            return
        spare = made.program.capacity.rows - len(rows)
        free = [row for row in range(self._state.max_rows) if row not in set(rows)][:spare]
        made.inputs = None  # unknown if this is interrupted
        upload_values([*rows, *free], made.program.rows)
        upload_values([True] * len(rows) + [False] * spare, made.program.live)
        upload_values([*requested, *[0] * spare], made.program.max_draft_nodes)
        made.inputs = rows, requested
