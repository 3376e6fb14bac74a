"""From the result of a step to what its requests keep: stop conditions, counters, log-probabilities, errors.

`sync` steps and CUDA-graph steps share it. Tests: tests/engine/.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from specdec_fast.adaptive.cost_model import DraftOutcome
from specdec_fast.core.distributions import TokenDistributions
from specdec_fast.core.draft import Draft
from specdec_fast.engine.cuda_graph.step_program import StepOutput
from specdec_fast.engine.request import Handle
from specdec_fast.engine.state import DecodeState
from specdec_fast.interfaces import Acceptance
from specdec_fast.sampling.logprobs import TokenLogprob, token_logprobs
from specdec_fast.sampling.sampling_tensors import SamplingTensors
from specdec_fast.sampling.target_distributions import find_invalid_distributions
from specdec_kernels import TreePlan

log = logging.getLogger("specdec_fast")
INVALID_LOGITS = "the model returned NaN or no finite logit"


@dataclass(slots=True)
class RowOutput:
    """The result of a step for one request.

    Attributes:
        tokens: Accepted tokens and the next token.
        num_accepted: Accepted draft tokens.
        num_draft_tokens: Draft tokens that could be accepted.
        num_nodes: Nodes of the tree, score-only nodes included, root not counted.
        complete: Whether the accepted path ends at a leaf, so that the next token is a bonus token.
        error: Why the text ends after these tokens, or "".
        path: Numbers of the accepted nodes among those that may be accepted, from 1. None for chains and CUDA graphs.
    """

    tokens: list[int]
    num_accepted: int
    num_draft_tokens: int
    num_nodes: int
    complete: bool
    error: str = ""
    path: Sequence[int] | None = None


def collect_row_outputs(
    draft: Draft, plan: TreePlan, acceptance: Acceptance, dists: TokenDistributions, sampling: SamplingTensors
) -> tuple[list[RowOutput], Acceptance]:
    """Reads the result of a `sync` step: its one host synchronisation.

    Args:
        draft: The draft that was verified.
        plan: Depths, ancestors and links of the M nodes.
        acceptance: What the rule accepted.
        dists: The target's distributions after the M nodes.
        sampling: Parameters of the B requests.

    Returns:
        One output for each request, and the acceptance with `num_accepted_host`.
    """
    invalid, has_child = find_invalid_distributions(acceptance.path, dists, sampling), None
    proposed, paths = [count - 1 for count in draft.counts], None
    if not draft.is_chain:
        proposed, inner = draft.count_proposals(plan)
        paths = draft.number_path(acceptance.path).tolist()
        last = acceptance.path.gather(1, acceptance.num_accepted[:, None].long()).squeeze(1)
        has_child = inner[last.long()].tolist()
    outputs = []
    for index, (emitted, accepted) in enumerate(DecodeState.read_emitted_tokens(draft, acceptance)):
        valid, error = invalid.get(index, (len(emitted), ""))
        accepted = min(accepted, valid)
        complete = accepted == proposed[index] if has_child is None else not has_child[index]
        path = None if paths is None else paths[index][:accepted]
        num_nodes = draft.counts[index] - 1
        outputs.append(RowOutput(emitted[:valid], accepted, proposed[index], num_nodes, complete, error, path))
    counts = tuple([output.num_accepted for output in outputs])
    path, num_accepted, next_token = acceptance.path, acceptance.num_accepted, acceptance.next_token
    return outputs, Acceptance(path, num_accepted, next_token, acceptance.node_choice, counts)


def graph_row_output(output: StepOutput) -> RowOutput:
    """Converts the result of a CUDA-graph step for one request."""
    valid = len(output.tokens) if output.first_invalid is None else output.first_invalid
    accepted, drafted = min(output.num_accepted, valid), output.num_draft_tokens
    complete = output.complete and accepted == output.num_accepted
    error = INVALID_LOGITS if output.first_invalid is not None else ""
    return RowOutput(output.tokens[:valid], accepted, drafted, drafted, complete, error)


def emit_tokens(
    handles: Sequence[Handle],
    outputs: Sequence[RowOutput],
    dists: TokenDistributions | None = None,
    paths: Sequence[Sequence[int]] = (),
) -> tuple[list[list[int]], list[DraftOutcome]]:
    """Appends the tokens of a step to its requests, up to the end of each text.

    Args:
        handles: The requests of the step.
        outputs: The result of each.
        dists: The target's distributions after the nodes, for requests that ask for log-probabilities.
        paths: Accepted nodes of each request, for the same.

    Returns:
        The tokens that each request kept, and what became of each draft.
    """
    kept: list[list[int]] = []
    outcomes: list[DraftOutcome] = []
    for index, (handle, output) in enumerate(zip(handles, outputs)):
        taken: list[int] = []  # `kept` gets one entry per request, whatever is raised
        try:
            accepted = output.num_accepted
            tested = accepted if output.complete else accepted + 1
            outcomes.append(DraftOutcome(output.num_draft_tokens, accepted, output.num_nodes, output.path))
            logprobs: list[TokenLogprob] = []
            count = handle.params.logprobs
            if count is not None and dists is not None:
                logprobs = token_logprobs(dists, paths[index], output.tokens, count)
            taken = handle.append_step(output.tokens, accepted, output.num_draft_tokens, tested, logprobs)
        except Exception as error:  # the tokenizer's: it ends this request, not the batch
            log.exception("request %d: its text could not be decoded", handle.request_id)
            handle.finish_reason, handle.error = "error", error
        kept.append(taken)
        if output.error and not handle.finished:
            handle.finish("error", ValueError(f"request {handle.request_id}: {output.error}"))
    return kept, outcomes
