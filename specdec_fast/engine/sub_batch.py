"""Parts of a batch: what a step or a prefill says about some of its rows. Tests: tests/engine/test_failures.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch

from specdec_fast.core.device_transfer import host_to_device
from specdec_fast.core.draft import Draft
from specdec_fast.interfaces import Acceptance, StateView, TargetOutput


def select_aux_hidden_states(
    view: StateView, rows: Sequence[int], wanted: Sequence[int], output: TargetOutput | None
) -> TargetOutput | None:
    """Selects the hidden states of some rows from the output of a prefill.

    Args:
        view: Committed data.
        rows: Rows of the prefill, in order.
        wanted: Rows of the result, in order.
        output: Hidden states of the committed tokens of `rows` but the roots, [M, hidden] by name, or None.

    Returns:
        Hidden states of the wanted rows, or None.
    """
    if output is None:
        return None
    shared = dict(zip(rows, output.num_shared)) if output.num_shared else dict.fromkeys(rows, 0)
    ends = list(accumulate(view.length(row) - 1 - shared[row] for row in rows))  # the root was not prefilled
    spans = {row: slice(start, end) for row, start, end in zip(rows, [0, *ends], ends)}
    aux_hidden_states = {
        name: torch.cat([aux_hidden_state[spans[row]] for row in wanted])
        for name, aux_hidden_state in output.aux_hidden_states.items()
    }
    num_shared = tuple(shared[row] for row in wanted) if output.num_shared else ()
    return TargetOutput(None, aux_hidden_states, num_shared)


def select_step_rows(
    draft: Draft, acceptance: Acceptance, output: TargetOutput, places: list[int]
) -> tuple[Draft, Acceptance, TargetOutput]:
    """Selects some rows from the result of a step.

    Args:
        draft: The draft that was verified.
        acceptance: What the rule accepted.
        output: Logits [M, V] and hidden states [M, hidden] of all nodes.
        places: Places of the rows in the batch.

    Returns:
        Draft, acceptance and output of these rows alone.
    """
    part, nodes = draft.select(places)
    place_of = torch.full((draft.num_nodes + 1,), -1, dtype=torch.int32, device=nodes.device)  # the last one is for -1
    place_of[nodes] = torch.arange(nodes.shape[0], dtype=torch.int32, device=nodes.device)
    choice, at = acceptance.node_choice, host_to_device(places, torch.int64, nodes.device)
    selected = replace(
        acceptance,
        path=place_of[acceptance.path[at].long()],
        num_accepted=acceptance.num_accepted[at],
        next_token=acceptance.next_token[at],
        node_choice=None if choice is None else choice[nodes],
        num_accepted_host=None
        if acceptance.num_accepted_host is None
        else tuple(acceptance.num_accepted_host[place] for place in places),
    )
    logits = None if output.logits is None else output.logits[nodes]
    return (
        part,
        selected,
        TargetOutput(
            logits, {name: aux_hidden_state[nodes] for name, aux_hidden_state in output.aux_hidden_states.items()}
        ),
    )
