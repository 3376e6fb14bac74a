"""Selects sub-blocks to skip by hidden-state similarity, without training or timing.

The last token of each text passes through the model layer by layer, over the exact keys and values of its prefix. For
every number of skipped sub-blocks, dynamic programming keeps the variant with the highest cosine similarity to the
hidden states of the whole model. Source: Chen et al. 2025 (CLaSp). Tests:
tests/tune/test_skipped_layers_by_similarity.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from specdec_fast.core.chain_layout import chain_layout
from specdec_fast.targets.huggingface import HuggingFaceTarget
from specdec_fast.targets.skipped_layers import SkippedLayers


@dataclass(frozen=True, slots=True)
class Variant:
    """A selection of skipped sub-blocks in the layers so far.

    Attributes:
        attention: Layers whose attention is skipped.
        mlp: Layers whose MLP is skipped.
        hidden: Hidden states behind the last layer so far, [1, R, H] for R texts.
        similarity: Mean cosine similarity to the hidden states of the whole model.
    """

    attention: tuple[int, ...]
    mlp: tuple[int, ...]
    hidden: Tensor
    similarity: float

    @property
    def skip(self) -> SkippedLayers:
        """The selection."""
        return SkippedLayers(self.attention, self.mlp)


@torch.inference_mode()
def similar_choices(target: HuggingFaceTarget, texts: Sequence[Sequence[int]]) -> list[Variant]:
    """Finds the best selection for every number of skipped sub-blocks.

    Args:
        target: The target, without rows.
        texts: Texts as token ids, at most as many as the target has rows.

    Returns:
        Selections, sorted by the number of skipped sub-blocks. Numbers that no selection has are left out.

    Raises:
        ValueError: If there are no texts or too many, or if one is empty or too long. If layers are recurrent.
    """
    if target.cache.why_no_rollback is not None:
        raise ValueError(
            f"layers by similarity: got a {type(target.model).__name__}, and {target.cache.why_no_rollback}; expected "
            "attention layers only, since layers run alone here; tune by trials instead (--method bayes)"
        )
    if not 1 <= len(texts) <= target.cache.max_rows or not all(texts):
        raise ValueError(
            f"texts: got {len(texts)}; expected 1..{target.cache.max_rows}, the target's rows, none of them empty"
        )
    rows = range(len(texts))
    try:
        for row, text in enumerate(texts):
            if not target.cache.reserve(row, len(text)):
                raise ValueError(f"texts: the pool has no room for {len(text)} tokens more; expected shorter texts")
        return _grow(target, *_run_layers(target, texts))
    finally:
        target.cache.release(list(rows))


def _run_layers(target: HuggingFaceTarget, texts: Sequence[Sequence[int]]) -> tuple[list[Any], list[Tensor]]:
    """Returns each layer as a function of hidden states at the texts' last tokens, and all hidden states between."""
    device = target.device
    prefixes = [(row, text[:-1]) for row, text in enumerate(texts) if len(text) > 1]
    if prefixes:
        shape = chain_layout(tuple(row for row, _ in prefixes), tuple(len(part) for _, part in prefixes), device)
        fed = torch.tensor([token for _, part in prefixes for token in part], dtype=torch.int64).to(device)
        target.extend(shape.rows, fed, shape.offsets, logits=False)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    states: list[Tensor] = []

    def keep(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        states.append(args[0] if args else kwargs["hidden_states"])
        calls.append((args, kwargs))
        ends[0] = output[0] if isinstance(output, tuple) else output

    ends: list[Any] = [None]
    layers = target.layers
    shape = chain_layout(tuple(range(len(texts))), (1,) * len(texts), device)
    last = torch.tensor([text[-1] for text in texts], dtype=torch.int64).to(device)
    with target.skip_layers(SkippedLayers()):  # compiled code would not call the hooks
        hooks = [layer.register_forward_hook(keep, with_kwargs=True) for layer in layers]
        try:
            target.extend(shape.rows, last, shape.offsets, logits=True)
        finally:
            for hook in hooks:
                hook.remove()

    def runner(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def run(hidden: Tensor) -> Tensor:
            named = {**kwargs, "hidden_states": hidden} if not args else kwargs
            output = layer(*((hidden, *args[1:]) if args else ()), **named)
            found: Tensor = output[0] if isinstance(output, tuple) else output
            return found

        return run

    return [runner(layer, *call) for layer, call in zip(layers, calls, strict=True)], [*states, ends[0]]


def _grow(target: HuggingFaceTarget, layers: list[Any], states: list[Tensor]) -> list[Variant]:
    """Runs the dynamic program, layer by layer."""
    kept = {0: Variant((), (), states[0], 1.0)}
    for index, layer in enumerate(layers):
        grown: dict[int, Variant] = {}
        ways = [((), ()), ((index,), ()), ((), (index,)), ((index,), (index,))]
        for attention, mlp in ways:
            try:
                with _without(target, attention, mlp):
                    for count, before in kept.items():
                        hidden = before.hidden if attention and mlp else layer(before.hidden)
                        close = float(cosine_similarity(hidden.float(), states[index + 1].float(), dim=-1).mean())
                        size = count + len(attention) + len(mlp)
                        if size not in grown or close > grown[size].similarity:
                            grown[size] = Variant((*before.attention, *attention), (*before.mlp, *mlp), hidden, close)
            except ValueError:
                if (attention, mlp) == ((), (index,)):  # this MLP cannot be skipped alone
                    continue
                raise
        kept = grown
    return [kept[count] for count in sorted(kept)]


def _without(target: Any, attention: tuple[int, ...], mlp: tuple[int, ...]) -> AbstractContextManager[None]:
    """Skips sub-blocks while entered, but none if both of a layer are skipped: that layer does not run."""
    found: AbstractContextManager[None] = target.skip_layers(
        SkippedLayers() if attention and mlp else SkippedLayers(attention, mlp)
    )
    return found
