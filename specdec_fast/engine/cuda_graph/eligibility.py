"""Which step mode serves, from what device, drafter, rule and requests need. Tests:
tests/engine/cuda_graph/test_step_program.py.

`sync`: the host sees the tokens of a step before the next begins. `graph`: a captured step, the host one step behind.
A captured step that failed is tried again, unless its program can never be captured.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from specdec_fast.adaptive.budget import BudgetPolicy
from specdec_fast.engine.cuda_graph.step_program import Capacity
from specdec_fast.engine.request import Handle
from specdec_fast.engine.state import DecodeState
from specdec_fast.interfaces import CudaGraphProposals, Drafter, Rule
from specdec_fast.sampling.logits_processors import has_penalties
from specdec_kernels.graph_capture import HostReadError
from specdec_kernels.names import unknown_name

MODES = ("auto", "sync", "graph")
RETRY_AFTER = 32
"""Steps in `sync` mode after the first failure of a captured step; twice as many after each further one."""
MAX_FAILURES = 3
"""Failures after which steps are not captured any more. Those of a capacity count until a step of it succeeds."""


def get_cuda_graph_proposals(drafter: Drafter | None, max_rows: int) -> CudaGraphProposals | str | None:
    """What proposes in captured steps (None: nothing does), or why the drafter cannot."""
    if drafter is None:
        return None
    if drafter.needs.host_tokens:
        return f"drafter {drafter.name} reads committed tokens on the host"
    make: Any = getattr(drafter, "cuda_graph_proposals", None)
    if make is None:
        return f"drafter {drafter.name} has no captured proposals"
    for part in type(drafter).__mro__:  # the nearest class that has one of the two has both
        if "cuda_graph_proposals" in vars(part):
            break
        if {"propose", "observe"} & vars(part).keys():
            own = f"proposes in a way of its own ({part.__name__})"
            return f"drafter {drafter.name} {own}, and cuda_graph_proposals() is inherited"
    return make(max_rows)


def engine_ineligible_reasons(
    mode: str, device: torch.device, proposals: CudaGraphProposals | str | None, rule: Rule, budget: BudgetPolicy
) -> list[str]:
    """Why no step of an engine can be captured: one sentence per reason. mode "graph" asks for them on any device.

    Raises ValueError for a mode that does not exist.
    """
    if mode not in MODES:
        raise ValueError(unknown_name("step_mode", mode, MODES))
    reasons = []
    if mode == "sync":
        reasons.append("step_mode is sync")
    elif device.type != "cuda" and mode != "graph":
        reasons.append(f"device is {device.type}: capture needs CUDA")
    if isinstance(proposals, str):
        reasons.append(proposals)
    if not getattr(rule, "replays", False):
        reasons.append(f"rule {rule.name} is not captured; replay and greedy are")
    if budget.name != "fixed":
        reasons.append(f"budget {budget.name} decides on the host, from every step")
    return reasons


def request_ineligible_reasons(running: Iterable[Handle]) -> list[str]:
    """Why a step of these requests cannot be captured."""
    return sorted({reason for handle in running for reason in _of_request(handle)})


def _of_request(handle: Handle) -> Iterable[str]:
    params = handle.params
    if params.stop:
        yield "a running request has stop strings"
    if has_penalties(params) or params.grammar is not None:
        yield "a running request has penalties or a grammar, which follow its tokens on the host"
    edits = (params.logit_bias, params.banned_token_ids, params.forced, params.min_new_tokens)
    if any(edits) or params.allowed_token_ids is not None:
        yield "a running request changes its logits (bias, banned, allowed or forced tokens, minimum length)"
    if params.logprobs is not None:
        yield "a running request wants logprobs"
    if len(handle.stop_ids) > DecodeState.STOP_IDS:
        yield f"a running request has more than {DecodeState.STOP_IDS} ids that end it"


class CaptureFailures:
    """Failures of an engine's captured steps: when the next attempt is due, and whether there is one.

    A program that asks the device for something would do so again: there is no other attempt. Whatever else fails may
    pass, such as memory that another program holds.
    """

    def __init__(self) -> None:
        self._counts: dict[Capacity | None, int] = {}
        self._steps_left = 0
        self.last: str | None = None  # what failed, whether or not there was a success since
        self._final = False

    @property
    def reason(self) -> str | None:
        """Why the next step is not captured, or None."""
        if self.last is None or self._final:
            return self.last
        return f"{self.last}; the next attempt is in {self._steps_left} steps" if self._steps_left else None

    def record_failure(self, capacity: Capacity | None, error: Exception) -> str:
        """Counts a failure.

        Args:
            capacity: Of the step, None if it was not known yet.
            error: What was raised.

        Returns:
            What failed and what happens instead, for the log.
        """
        own = self._counts[capacity] = self._counts.get(capacity, 0) + 1
        count = min(sum(self._counts.values()), MAX_FAILURES)
        self.last = f"a captured step failed: {type(error).__name__}: {error}"
        self._final = isinstance(error, HostReadError) or own >= MAX_FAILURES
        if self._final:
            return f"{self.last}; steps are not captured from now on"
        self._steps_left = RETRY_AFTER << (count - 1)
        return f"{self.last}; the next attempt is in {self._steps_left} steps"

    def record_success(self, capacity: Capacity | None) -> None:
        """A captured step of this capacity was launched."""
        if self._counts:
            self._counts.pop(capacity, None)
            self._counts.pop(None, None)

    def record_sync_step(self) -> None:
        """A step ran in `sync` mode."""
        self._steps_left = max(self._steps_left - 1, 0)
