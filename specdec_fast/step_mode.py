"""Which step mode serves: declared from what device, drafter and requests need. Tests: tests/engine/test_engine.py.

`sync`: the host sees the tokens of a step before the next begins. `graph`: a captured step, the host one step behind.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from specdec_fast.edits import has_penalties
from specdec_fast.interfaces import Needs
from specdec_fast.request import Handle


def why_not_graph(device: torch.device, needs: Needs, running: Iterable[Handle]) -> list[str]:
    """Why a step cannot be captured: one sentence per reason."""
    reasons, running = [], list(running)
    if device.type != "cuda":
        reasons.append(f"device is {device.type}: capture needs CUDA")
    if needs.host_tokens:
        reasons.append("the drafter reads committed tokens on the host")
    if any(handle.params.stop for handle in running):
        reasons.append("a running request has stop strings")
    if any(has_penalties(handle.params) or handle.params.grammar is not None for handle in running):
        reasons.append("a running request has penalties or a grammar, which follow its tokens on the host")
    reasons.append("captured steps are not built yet")
    return reasons
