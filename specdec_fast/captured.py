"""Captured steps of an engine: programs per capacity, replayed without waiting, and what they gave, one step behind.

Owns the programs, the ring of results and which rows are published; decides nothing about requests.
Tests: tests/engine/test_graph_step.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec_fast.graph_step import Capacity, Emission, StepProgram
from specdec_fast.interfaces import CapturedProposals, Rule, Target
from specdec_fast.request import Handle
from specdec_fast.state import DecodeState

RING = 4
"""Results that may be under way at once; two are."""


def capture(program: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """A CUDA graph of the program, as a callable; the program itself on other devices.

    The program must do nothing when it runs now: it runs twice, so that kernels are compiled and libraries awake.
    """
    if device.type != "cuda":
        return program
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        program()
        program()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        program()
    return graph.replay


@dataclass(slots=True)
class _Made:
    """A program, how to run it, its ring of results on the host, and what its inputs were last set to."""

    program: StepProgram
    run: Callable[[], None]
    ring: list[Tensor]
    inputs: tuple[Any, ...] | None = None
    turns: int = 0


@dataclass(frozen=True, slots=True)
class _Pending:
    handles: list[Handle]
    results: Tensor
    done: torch.cuda.Event | None


class CapturedSteps:
    """One step at a time is under way: `launch` starts the next, `read` answers with the one before."""

    def __init__(self, target: Target, proposals: CapturedProposals | None, rule: Rule, state: DecodeState) -> None:
        self._target, self._proposals, self._rule, self._state = target, proposals, rule, state
        self._made: dict[Capacity, _Made] = {}
        self._entered: set[int] = set()
        self._pending: list[_Pending] = []

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
        """What programs were made for."""
        return list(self._made)

    def launch(self, running: dict[int, Handle], most: Sequence[int]) -> None:
        """Start a step of all running rows; most: draft nodes that each may have."""
        handles = list(running.values())
        joining = [row for row in running if row not in self._entered]
        if joining:
            self._state.publish(joining)
            self._entered.update(joining)
        if self._proposals is not None:
            most = [count if count and self._reserve(running[row], count) else 0 for row, count in zip(running, most)]
            self._proposals.enter(self._state, [row for row, count in zip(running, most) if count and row in joining])
        greedy = all(handle.params.temperature == 0 for handle in handles)
        widest = max((handle.num_draft_tokens for handle in handles), default=0) if self._proposals is not None else 0
        rows = min(1 << (len(handles) - 1).bit_length(), self._state.max_rows)
        made = self._program(Capacity(rows, widest + 1, greedy))
        self._set(made, list(running), most)
        made.run()
        slot = made.ring[made.turns % RING]
        made.turns += 1
        slot.copy_(made.program.results, non_blocking=True)
        event = None
        if self._state.device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
        self._pending.append(_Pending(handles, slot, event))

    def read(self) -> list[tuple[Handle, Emission]]:
        """What the oldest pending step gave; requests that have ended since are passed over."""
        step = self._pending.pop(0)
        if step.done is not None:
            step.done.synchronize()
        found = zip(step.handles, StepProgram.read(step.results))
        return [(handle, got) for handle, got in found if got is not None and not handle.finished]

    def leave(self, row: int) -> None:
        """A row is given up; what is under way for it is forgotten with its request."""
        self._entered.discard(row)

    def suspend(self) -> None:
        """Rows go back to steps that are not captured; nothing may be pending."""
        if self._proposals is not None:
            self._proposals.leave(sorted(self._entered))
        self._state.withdraw(sorted(self._entered))
        self._entered.clear()

    def _reserve(self, handle: Handle, count: int) -> bool:
        """Room in the draft's cache for the step to come, whatever the steps under way accept."""
        assert self._proposals is not None and handle.checker is not None and handle.row is not None
        ahead = min(self.pending * (count + 1) + count, handle.checker.remaining)
        return self._proposals.reserve(handle.row, self._state.length(handle.row) + ahead)

    def _program(self, capacity: Capacity) -> _Made:
        made = self._made.get(capacity)
        if made is None:
            program = StepProgram(capacity, self._target, self._proposals, self._rule, self._state)
            pinned = self._state.device.type == "cuda"
            ring = [torch.zeros(program.results.shape, dtype=torch.int64, pin_memory=pinned) for _ in range(RING)]
            run = capture(program, self._state.device)  # without live rows it changes nothing
            made = self._made[capacity] = _Made(program, run, ring)
        return made

    def _set(self, made: _Made, rows: list[int], most: Sequence[int]) -> None:
        """The inputs of the program, if they are not what they were; places to spare get rows that nobody uses."""
        inputs = (tuple(rows), tuple(most))
        if made.inputs == inputs:
            return
        made.inputs, spare = inputs, made.program.capacity.rows - len(rows)
        free = [row for row in range(self._state.max_rows) if row not in set(rows)][:spare]
        for tensor, values in (
            (made.program.rows, [*rows, *free]),
            (made.program.live, [True] * len(rows) + [False] * spare),
            (made.program.most, [*most, *[0] * spare]),
        ):
            tensor.copy_(torch.tensor(values, dtype=tensor.dtype))
