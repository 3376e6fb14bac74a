"""A lower bound of the memory that training a head takes, compared with the memory that is available.

Tests: tests/train/heads/test_memory_estimate.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from specdec_fast.train.heads.settings import Settings

_COPIES = 4
"""Weights, gradients, and the two moments of AdamW."""


def least_bytes(trainee: Any, settings: Settings) -> int:
    """Computes a lower bound of the bytes that a training step takes besides the target.

    Args:
        trainee: A trainee with the attribute `logits_per_token`.
        settings: Settings of the run.

    Returns:
        Bytes of weights, gradients and moments, and of the logits with their log-probabilities in float32.
    """
    weights = sum(each.numel() * each.element_size() for each in trainee.parameters() if each.requires_grad)
    return _COPIES * weights + 2 * 4 * trainee.logits_per_token * settings.batch * settings.length


def available_bytes(device: torch.device) -> int | None:
    """Returns the free memory of a device; None if the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return None


def memory_note(trainee: Any, settings: Settings, device: torch.device) -> str | None:
    """Returns a note if a training step needs more memory than there is, else None."""
    needed, free = least_bytes(trainee, settings), available_bytes(device)
    if free is None or needed <= free:
        return None
    return (
        f"a training step takes at least {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free; lower --batch or "
        "--length, take --tied heads (medusa), or a smaller --vocab (eagle3)"
    )
