"""From what a step gave a batch to what its requests keep: stop conditions, counters, log-probabilities, errors.

The same for steps that are captured and steps that are not. Tests: tests/engine/.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from specdec_fast.adaptive.cost_model import Outcome
from specdec_fast.core.distributions import TokenDistributions
from specdec_fast.core.draft import Draft
from specdec_fast.engine.cuda_graph.step_program import StepOutput
from specdec_fast.engine.request import Handle
from specdec_fast.engine.state import DecodeState
from specdec_fast.interfaces import Acceptance
from specdec_fast.sampling.logprobs import token_logprobs
from specdec_fast.sampling.sampling_tensors import SamplingTensors
from specdec_fast.sampling.target_distributions import find_invalid_distributions
from specdec_kernels import TreePlan

log = logging.getLogger("specdec_fast")
NO_DIST = "the model returned NaN or no finite logit"


@dataclass(slots=True)
class RowOutput:
    """What a step gave one request. tokens: accepted ones and the next; drafted, depth: of its draft (of captured
    ones a bound of the depth); nodes: with its score-only nodes; complete: nothing of the draft was left to test;
    reason: why the text breaks off after these tokens, or "".
    """

    tokens: list[int]
    accepted: int
    drafted: int
    depth: int
    nodes: int
    complete: bool
    reason: str = ""


def collect_row_outputs(
    draft: Draft, plan: TreePlan, acceptance: Acceptance, dists: TokenDistributions, sampling: SamplingTensors
) -> tuple[list[RowOutput], Acceptance]:
    """What a step that is not captured gave its rows, its one host synchronisation; and the answer with that."""
    broken, goes_on = find_invalid_distributions(acceptance.path, dists, sampling), None
    proposed, depths = [count - 1 for count in draft.counts], [count - 1 for count in draft.counts]
    if not draft.is_chain:
        proposed, depths, inner = draft.count_proposals(plan)
        last = acceptance.path.gather(1, acceptance.num_accepted[:, None].long()).squeeze(1)
        goes_on = inner[last.long()].tolist()
    found = []
    for index, (emitted, accepted) in enumerate(DecodeState.read_emitted_tokens(draft, acceptance)):
        sound, reason = broken.get(index, (len(emitted), ""))
        accepted = min(accepted, sound)
        complete = accepted == proposed[index] if goes_on is None else not goes_on[index]
        found.append(
            RowOutput(
                emitted[:sound], accepted, proposed[index], depths[index], draft.counts[index] - 1, complete, reason
            )
        )
    of, counts = acceptance, tuple([each.accepted for each in found])
    return found, Acceptance(of.path, of.num_accepted, of.next_token, of.node_choice, counts)


def collect_graph_outputs(emission: StepOutput) -> RowOutput:
    """What a captured step gave a row."""
    sound = len(emission.tokens) if emission.broken is None else emission.broken
    accepted, drafted = min(emission.accepted, sound), emission.drafted
    complete = emission.complete and accepted == emission.accepted
    reason = NO_DIST if emission.broken is not None else ""
    return RowOutput(emission.tokens[:sound], accepted, drafted, drafted, drafted, complete, reason)


def emit_tokens(
    handles: Sequence[Handle],
    given: Sequence[RowOutput],
    dists: TokenDistributions | None = None,
    path: Sequence[Sequence[int]] = (),
) -> tuple[list[list[int]], list[Outcome]]:
    """Hand out tokens up to the end of each text: (tokens kept per row, what became of the drafts).

    distributions, path: of the nodes, for requests that want log-probabilities.
    """
    kept: list[list[int]] = []
    outcomes: list[Outcome] = []
    for index, (handle, got) in enumerate(zip(handles, given)):
        taken: list[int] = []  # exactly one entry of `kept` per row, whatever happens
        try:
            tested = got.accepted if got.complete else got.accepted + 1
            outcomes.append(Outcome(got.drafted, got.depth, tested, got.accepted, got.nodes))
            count, levels = handle.params.logprobs, []
            if count is not None and dists is not None:
                levels = token_logprobs(dists, path[index], got.tokens, count)
            taken = handle.append_step(got.tokens, got.accepted, got.drafted, tested, levels)
        except Exception as error:  # the tokenizer's: it ends this request, not the batch
            log.exception("request %d: its text could not be made", handle.request_id)
            handle.finish_reason, handle.error = "error", error
        kept.append(taken)
        if got.reason and not handle.finished:
            handle.finish("error", ValueError(f"request {handle.request_id}: {got.reason}"))
    return kept, outcomes
