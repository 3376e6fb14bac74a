"""Positions for attention modules that count their tokens, as the temperature tuning of Llama 4 does.

Such a module takes the place of a token in a pass, plus the length of its cache, for the token's position. A packed
pass has branches and requests, so both would be wrong. The module gets an object in place of its cache, whose length
differs by token and makes the sum the position. Tests: tests/targets/test_chunked_attention.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _CountedPositions:
    """What a module gets in place of its cache. It stores nothing.

    Args:
        positions: Position of each token, int64 [M].
    """

    def __init__(self, positions: Tensor) -> None:
        self._ahead = positions - torch.arange(positions.shape[0], device=positions.device)

    def get_seq_length(self, *_: Any) -> Tensor:
        """Returns what the module adds to the places of its tokens, int64 [M]."""
        return self._ahead

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Returns the keys and values of this pass. The attention function stores them."""
        return key, value


def count_by_position(model: torch.nn.Module) -> Callable[[], None]:
    """Gives modules that count their tokens the positions of packed passes. Other passes stay as they are.

    Args:
        model: A transformers model.

    Returns:
        A function that gives the modules back as they were.
    """
    counting = [each for each in model.modules() if getattr(each, "attn_temperature_tuning", False)]
    hooks = [
        each.register_forward_pre_hook(_give_positions, with_kwargs=True)
        for each in counting
        if hasattr(each, "layer_idx")
    ]

    def restore() -> None:
        for hook in hooks:
            hook.remove()

    return restore


def _give_positions(_module: Any, args: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    positions = getattr(named.get("packed"), "positions", None)
    return None if positions is None else (args, {**named, "past_key_values": _CountedPositions(positions)})
