"""Prefill: keys and values of committed tokens, in chunks of several rows at once.

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
    """Stores keys and values of texts in rows that hold nothing yet, and have room for them.

    Args:
        target: Whose cache is filled.
        texts: Token ids by row, in the order of the auxiliary hidden states.
        chunk: Most tokens of a pass.
        auxiliary hidden states: Hidden states that are wanted.
        device: The target's.

    Returns:
        The auxiliary hidden states of all tokens, [M, hidden] each, row after row. None without auxiliary hidden
        states.
    """
    left = {row: list(tokens) for row, tokens in texts.items()}
    outputs: dict[str, list[torch.Tensor]] = {}
    while any(left.values()):
        room, batch = chunk, []
        for row, tokens in left.items():
            take = min(room, len(tokens))
            if take:
                batch.append((row, tokens[:take]))
                left[row], room = tokens[take:], room - take
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
