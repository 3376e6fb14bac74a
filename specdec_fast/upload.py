"""Numbers of the host on the device without waiting for it: a pinned source, so that the copy is a part of the stream.

Tests: tests/cache/test_paged.py, tests/engine/test_graph_step.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def upload(values: Sequence[int] | Sequence[bool], place: Tensor) -> None:
    """Write values into a tensor of as many elements. On CUDA behind what the current stream has been given so far; the
    source is not used again before it was read.
    """
    source = torch.tensor(values, dtype=place.dtype, pin_memory=place.device.type == "cuda")
    place.copy_(source, non_blocking=True)
