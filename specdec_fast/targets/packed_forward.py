"""The packed pass of a transformers model by its own modules. Tests: tests/targets/test_huggingface.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from specdec_fast.targets import attention
from specdec_fast.targets.rotary_pinning import RotaryPinning

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def build_packed_forward(model: PreTrainedModel, rotary: RotaryPinning) -> Callable[..., Tensor]:
    """Returns a packed pass of a model: tokens int64 [M] to logits [M, V], or [N, V] of `wanted` nodes int64 [N].

    It is one function for the compiler: the code around the model's forward costs a small pass more than some layers.
    The caller stops `rotary` behind it.
    """

    def run(tokens: Tensor, positions: Tensor, wanted: Tensor | None, packed: attention.PackedContext) -> Tensor:
        rotary.start(packed.longest)
        output = model.forward(
            input_ids=tokens.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=0 if wanted is None else wanted,
            packed=packed,
        )
        logits: Tensor = output.logits[0]
        return logits

    return run
