"""Prefill: stores keys and values of committed tokens, in chunks that may span several rows.

Tests: tests/engine/test_engine.py, tests/targets/test_aux_hidden_states.py, tests/launch/test_uploads.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch

from specdec_fast.core.device_transfer import host_to_device
from specdec_fast.interfaces import Target, TargetOutput


def prefill(
    target: Target,
    texts: Mapping[int, Sequence[int]],
    chunk: int,
    aux_hidden_states: Sequence[str],
    device: torch.device,
) -> TargetOutput | None:
    """Stores keys and values of texts behind what rows hold. Their pages are reserved.

    Args:
        target: The model whose cache is filled.
        texts: Token ids by row.
        chunk: Most tokens of a pass.
        aux_hidden_states: Names of hidden states to return, as in `Needs.aux_hidden_states`.
        device: Device of the target.

    Returns:
        Hidden states of all tokens by name, [M, hidden] each, in the order of `texts`. None if no names are given.
    """
    left = {row: list(tokens) for row, tokens in texts.items()}
    outputs: dict[str, list[torch.Tensor]] = {}
    while any(left.values()):
        budget, batch = chunk, []
        for row, tokens in left.items():
            take = min(budget, len(tokens))
            if take:
                batch.append((row, tokens[:take]))
                left[row], budget = tokens[take:], budget - take
        output = target.extend(
            host_to_device([row for row, _ in batch], torch.int32, device),
            host_to_device([token for _, tokens in batch for token in tokens], torch.int64, device),
            host_to_device([0, *accumulate(len(tokens) for _, tokens in batch)], torch.int32, device),
            logits=False,
            aux_hidden_states=aux_hidden_states,
        )
        for name, aux_hidden_state in output.aux_hidden_states.items():
            outputs.setdefault(name, []).append(aux_hidden_state)
    return TargetOutput(None, {name: torch.cat(parts) for name, parts in outputs.items()}) if outputs else None
