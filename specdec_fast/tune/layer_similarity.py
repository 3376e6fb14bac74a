"""A choice without training or timing: dynamic programming over hidden-state similarity (CLaSp, Chen et al. 2025).

The last token of each text goes through the model layer by layer over the exact keys and values of its prefix. For
every number of sub-blocks left out so far, the variant whose hidden states point most nearly where the whole model's do
is kept and goes on. Tests: tests/tune/test_layer_similarity.py.
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
from specdec_fast.targets.layer_choice import SkippedLayers


@dataclass(frozen=True, slots=True)
class Variant:
    """What is left out so far; hidden: [1, R, H]; similarity: mean cosine with the whole model's, over R texts."""

    attention: tuple[int, ...]
    mlp: tuple[int, ...]
    hidden: Tensor
    similarity: float

    @property
    def skip(self) -> SkippedLayers:
        return SkippedLayers(self.attention, self.mlp)


@torch.inference_mode()
def similar_choices(target: HuggingFaceTarget, texts: Sequence[Sequence[int]]) -> list[Variant]:
    """The best found choice for every number of sub-blocks left out: entry n leaves out n, as far as that is possible.

    texts: token ids, each in a row of its own, fewer than the target has rows or as many. Raises ValueError when there
    are none or too many, or when one is too long.
    """
    if not 1 <= len(texts) <= target.cache.max_rows or not all(texts):
        raise ValueError(
            f"texts: got {len(texts)}; expected 1..{target.cache.max_rows}, the target's rows, none of them empty"
        )
    rows = range(len(texts))
    try:
        for row, text in enumerate(texts):
            if not target.cache.reserve(row, len(text)):
                raise ValueError(f"texts: the pool has no room for {len(text)} tokens more; expected shorter texts")
        return _grow(target, *_whole_pass(target, texts))
    finally:
        target.cache.release(list(rows))


def _whole_pass(target: HuggingFaceTarget, texts: Sequence[Sequence[int]]) -> tuple[list[Any], list[Tensor]]:
    """Each layer as a function of hidden states, at the last token of every text; and what enters and leaves each."""
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
    with target.skip_layers(SkippedLayers()):  # hooks are not seen by compiled code
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
                if (attention, mlp) == ((), (index,)):  # an MLP that is no part of its own
                    continue
                raise
        kept = grown
    return [kept[count] for count in sorted(kept)]


def _without(target: Any, attention: tuple[int, ...], mlp: tuple[int, ...]) -> AbstractContextManager[None]:
    found: AbstractContextManager[None] = target.skip_layers(
        SkippedLayers() if attention and mlp else SkippedLayers(attention, mlp)
    )
    return found
