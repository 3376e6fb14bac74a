"""Which step mode applies: whether device, drafter, rule and requests allow CUDA-graph steps.

`sync`: the host sees the tokens of a step before the next begins. `graph`: a CUDA-graph step, with the host one step
behind. A step that failed is tried again later, unless its program can never be captured.

Tests: tests/engine/cuda_graph/test_step_program.py, tests/launch/test_capture.py.
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
from specdec_fast.sampling.text_processors import reads_text
from specdec_kernels.graph_capture import HostReadError
from specdec_kernels.unknown_names import unknown_name

MODES = ("auto", "sync", "graph")
RETRY_AFTER = 32
"""`sync` steps after the first failure of a CUDA-graph step; twice as many after each further failure."""
MAX_FAILURES = 3
"""Failures of one capacity after which all steps are `sync`. They count until a step of that capacity succeeds."""


def get_cuda_graph_proposals(drafter: Drafter | None, max_rows: int) -> CudaGraphProposals | str | None:
    """Returns the proposals of a drafter for CUDA-graph steps.

    Args:
        drafter: The drafter, or None.
        max_rows: Rows of the decode state.

    Returns:
        The proposals; None without a drafter; or one sentence that says why the drafter has none.
    """
    if drafter is None:
        return None
    if drafter.needs.host_tokens:
        return f"drafter {drafter.name} reads committed tokens on the host"
    make: Any = getattr(drafter, "cuda_graph_proposals", None)
    if make is None:
        return f"drafter {drafter.name} has no proposals for CUDA graphs"
    for part in type(drafter).__mro__:  # a subclass that proposes differently must define all three methods
        if "cuda_graph_proposals" in vars(part):
            break
        if {"propose", "observe"} & vars(part).keys():
            own = f"proposes in a way of its own ({part.__name__})"
            return f"drafter {drafter.name} {own}, and cuda_graph_proposals() is inherited"
    return make(max_rows)


def engine_ineligible_reasons(
    mode: str,
    device: torch.device,
    proposals: CudaGraphProposals | str | None,
    rule: Rule,
    budget: BudgetPolicy,
) -> list[str]:
    """Returns why no step of an engine can run as a CUDA graph, one sentence per reason.

    Args:
        mode: The option `step_mode`. "graph" allows devices without CUDA.
        device: Device of the target.
        proposals: What `get_cuda_graph_proposals` returned.
        rule: The verification rule.
        budget: The budget policy.

    Raises:
        ValueError: For an unknown mode.
    """
    if mode not in MODES:
        raise ValueError(unknown_name("step_mode", mode, MODES))
    reasons = []
    if mode == "sync":
        reasons.append("step_mode is sync")
    elif device.type != "cuda" and mode != "graph":
        reasons.append(f"CUDA graphs need a GPU, and the device is {device.type}")
    if isinstance(proposals, str):
        reasons.append(proposals)
    if not getattr(rule, "replays", False):
        reasons.append(f"rule {rule.name} is not captured; replay and greedy are")
    if budget.name != "fixed":
        reasons.append(f"budget {budget.name} decides on the host, from every step")
    return reasons


def request_ineligible_reasons(running: Iterable[Handle]) -> list[str]:
    """Returns why a step of these requests cannot run as a CUDA graph, one sentence per reason."""
    return sorted({reason for handle in running for reason in _of_request(handle)})


def _of_request(handle: Handle) -> Iterable[str]:
    """The reasons of one request."""
    params = handle.params
    if params.stop:
        yield "a running request has stop strings"
    if reads_text(params):
        yield "a running request has n-grams, bad words or custom processors, which read its text on the host"
    if has_penalties(params) or params.grammar is not None:
        yield "a running request has penalties or a grammar, which follow its tokens on the host"
    processors = (params.logit_bias, params.banned_token_ids, params.forced, params.min_new_tokens)
    if any(processors) or params.allowed_token_ids is not None:
        yield "a running request changes its logits (bias, banned, allowed or forced tokens, minimum length)"
    if params.logprobs is not None:
        yield "a running request wants logprobs"
    if len(handle.stop_ids) > DecodeState.STOP_IDS:
        yield f"a running request has more than {DecodeState.STOP_IDS} ids that end it"


class CaptureFailures:
    """The failures of an engine's CUDA-graph steps, and when the next attempt is due.

    A program that reads from the device would do so again, so it is not tried again. Other failures may pass, such as
    those of memory that another program holds.

    Attributes:
        last: The last failure, in words, even if a step succeeded since; None if none failed.
    """

    def __init__(self) -> None:
        self._counts: dict[Capacity | None, int] = {}
        self._steps_left = 0
        self.last: str | None = None
        self._final = False

    @property
    def reason(self) -> str | None:
        """Why the next step does not run as a CUDA graph, or None if it may."""
        if self.last is None or self._final:
            return self.last
        return f"{self.last}; the next attempt is in {self._steps_left} steps" if self._steps_left else None

    def record_failure(self, capacity: Capacity | None, error: Exception) -> str:
        """Counts a failure.

        Args:
            capacity: Capacity of the step, or None if it was not known yet.
            error: The exception that was raised.

        Returns:
            The failure and its consequence, for the log.
        """
        own = self._counts[capacity] = self._counts.get(capacity, 0) + 1
        count = min(sum(self._counts.values()), MAX_FAILURES)
        self.last = f"a CUDA-graph step failed: {type(error).__name__}: {error}"
        self._final = isinstance(error, HostReadError) or own >= MAX_FAILURES
        if self._final:
            return f"{self.last}; steps run in sync mode from now on"
        self._steps_left = RETRY_AFTER << (count - 1)
        return f"{self.last}; the next attempt is in {self._steps_left} steps"

    def record_success(self, capacity: Capacity | None) -> None:
        """Records that a CUDA-graph step of this capacity was launched."""
        if self._counts:
            self._counts.pop(capacity, None)
            self._counts.pop(None, None)

    def record_sync_step(self) -> None:
        """Records that a step ran in `sync` mode."""
        self._steps_left = max(self._steps_left - 1, 0)
