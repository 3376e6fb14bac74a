"""Prefill: stores keys and values of committed tokens, in chunks that may span several rows.

Tests: tests/engine/test_engine.py, tests/targets/test_aux_hidden_states.py, tests/launch/test_uploads.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch

from specdec_fast.core.device_transfer import host_to_device
from specdec_fast.engine.prompt_scoring import PromptScores
from specdec_fast.interfaces import Target, TargetOutput


def prefill(
    target: Target,
    texts: Mapping[int, Sequence[int]],
    chunk: int,
    aux_hidden_states: Sequence[str],
    device: torch.device,
    scores: PromptScores | None = None,
) -> TargetOutput | None:
    """Stores keys and values of texts behind what rows hold. Their pages are reserved.

    Args:
        target: The model whose cache is filled.
        texts: Token ids by row.
        chunk: Most tokens of a pass.
        aux_hidden_states: Names of hidden states to return, as in `Needs.aux_hidden_states`.
        device: Device of the target.
        scores: Collects log-probabilities of prompts. None if no row needs them.

    Returns:
        Hidden states of all tokens by name, [M, hidden] each, in the order of `texts`. None if no names are given.
    """
    left = {row: list(tokens) for row, tokens in texts.items()}
    outputs: dict[str, list[torch.Tensor]] = {}
    while any(left.values()):
        batch = _next_batch(left, chunk, scores)
        places = [] if scores is None else scores.places(batch)
        output = target.extend(
            host_to_device([row for row, _ in batch], torch.int32, device),
            host_to_device([token for _, tokens in batch for token in tokens], torch.int64, device),
            host_to_device([0, *accumulate(len(tokens) for _, tokens in batch)], torch.int32, device),
            logits=host_to_device(places, torch.int64, device) if places else False,
            aux_hidden_states=aux_hidden_states,
        )
        if scores is not None and output.logits is not None:
            scores.add(batch, output.logits)
        for name, aux_hidden_state in output.aux_hidden_states.items():
            outputs.setdefault(name, []).append(aux_hidden_state)
    return TargetOutput(None, {name: torch.cat(parts) for name, parts in outputs.items()}) if outputs else None


def _next_batch(left: dict[int, list[int]], chunk: int, scores: PromptScores | None) -> list[tuple[int, list[int]]]:
    """Takes the tokens of the next pass from what is left of each row. A row ends before the next one begins."""
    batch: list[tuple[int, list[int]]] = []
    scored = 0
    for row, tokens in left.items():
        take = min(chunk, len(tokens))
        limit = scores.limit(row, scored) if scores is not None else None
        if limit is not None:
            take = min(take, limit)
            scored += take
        if take:
            batch.append((row, tokens[:take]))
            left[row], chunk = tokens[take:], chunk - take
        if left[row]:
            break
    return batch
