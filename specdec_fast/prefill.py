"""Prefill: keys and values of committed tokens, in chunks of several rows at once.

Tests: tests/engine/test_engine.py, tests/targets/test_taps.py, tests/launch/test_uploads.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch

from specdec_fast.interfaces import Target, TargetOutput
from specdec_fast.upload import from_host


def prefill(
    target: Target, texts: Mapping[int, Sequence[int]], chunk: int, taps: Sequence[str], device: torch.device
) -> TargetOutput | None:
    """Stores keys and values of texts in rows that hold nothing yet, and have room for them.

    Args:
        target: Whose cache is filled.
        texts: Token ids by row, in the order of the taps.
        chunk: Most tokens of a pass.
        taps: Hidden states that are wanted.
        device: The target's.

    Returns:
        The taps of all tokens, [M, hidden] each, row after row. None without taps.
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
            from_host([row for row, _ in batch], torch.int32, device),
            from_host([token for _, tokens in batch for token in tokens], torch.int64, device),
            from_host([0, *accumulate(len(tokens) for _, tokens in batch)], torch.int32, device),
            logits=False,
            taps=taps,
        )
        for name, tap in output.taps.items():
            outputs.setdefault(name, []).append(tap)
    return TargetOutput(None, {name: torch.cat(parts) for name, parts in outputs.items()}) if outputs else None
