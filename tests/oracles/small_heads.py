"""Small heads, hidden states and learnable text for tests of the trainer."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from oracles import models
from specdec_fast.heads.medusa import MedusaHeads
from specdec_fast.train.heads.parallel import AUX_HIDDEN_STATE
from specdec_fast.train.heads.trainer import TargetStates

HEADS = 3


def tiny() -> tuple[Any, TargetStates]:
    model = models.own("llama")
    return model, TargetStates(model, (AUX_HIDDEN_STATE,))


def some_heads(model: Any, **options: Any) -> MedusaHeads:
    torch.manual_seed(0)
    weight = model.get_output_embeddings().weight
    heads = MedusaHeads(weight.shape[1], weight.shape[0], HEADS, **options)
    for parameter in heads.parameters():
        nn.init.normal_(parameter, std=0.1)
    return heads


def row_of(length: int, seed: int = 0) -> np.ndarray:
    """Returns tokens that follow a rule, so that a head can learn them."""
    source = np.random.default_rng(seed)
    found = [5]
    while len(found) < length:
        found.append((found[-1] * 7 + 3) % 90 + 1 if source.random() < 0.9 else int(source.integers(1, 91)))
    return np.asarray(found, dtype=np.int32)
