"""How the weights of linear layers lie in memory on a CPU. Tests: tests/targets/test_weight_layout.py."""

from __future__ import annotations

import torch

__all__ = ["store_by_input"]


def store_by_input(model: torch.nn.Module) -> None:
    """Lay the weights of all linear layers out with the outputs of one input side by side, in place. Idempotent.

    Values, shapes and names stay; strides become (1, outputs). A product of few rows, which is all that decoding does,
    is then a sum of whole stored vectors: matrix libraries take less time for few rows that way. A weight that is an
    embedding too is looked up by row and stays as it is.
    """
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    for module in model.modules():
        if type(module) is torch.nn.Linear and id(module.weight) not in embeddings:
            module.weight.data = module.weight.data.t().contiguous().t()
