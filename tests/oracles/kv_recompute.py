"""The expected contents of a cache: keys and values of a fresh forward pass by the untouched model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from specdec_fast.targets.huggingface import HuggingFaceTarget


def recomputed(model: Any, tokens: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns keys and values per layer, [length, heads, dim], from transformers' own cache."""
    from transformers import DynamicCache

    cache = DynamicCache()  # without a configuration, so that windows do not truncate it
    with torch.no_grad():
        model(torch.tensor([list(tokens)]), past_key_values=cache, use_cache=True)
    return [(layer.keys[0].transpose(0, 1), layer.values[0].transpose(0, 1)) for layer in cache.layers]


def holds(target: HuggingFaceTarget, row: int, tokens: Sequence[int], model: Any, whole: bool = True) -> None:
    """Checks that a row holds exactly these tokens, or begins with them if not `whole`."""
    length = int(target.cache.lengths[row])
    assert length == len(tokens) if whole else length >= len(tokens)
    for index, (keys, values) in enumerate(recomputed(model, tokens) if tokens else []):
        ours = target.cache.read(row, index)
        assert torch.allclose(ours[0][: len(tokens)], keys, atol=2e-5, rtol=1e-4), f"keys of layer {index}, row {row}"
        assert torch.allclose(ours[1][: len(tokens)], values, atol=2e-5, rtol=1e-4), (
            f"values of layer {index}, row {row}"
        )
