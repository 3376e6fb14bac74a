"""Runs a transformers model without some of its attention and MLP sub-blocks (Zhang et al. 2023, section 3.1).

A sub-block that is left out adds nothing to the residual stream, and its norm is left out with it where that feeds
nobody else; a layer without both is not called at all. What feeds what is seen in one pass, so no architecture is named
here. Tests: tests/targets/test_layer_skipping.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec_fast.targets import attention
from specdec_fast.targets.skipped_layers import SkippedLayers

Forward = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer and how its parts are replaced: pairs of a module and its forward."""

    whole: list[tuple[torch.nn.Module, Forward]]
    attention: list[tuple[torch.nn.Module, Forward]]
    mlp: list[tuple[torch.nn.Module, Forward]] | None


class LayerSkipping:
    """The sub-blocks of a model whose attention is that of a target.

    Raises ValueError where a layer's attention cannot be told from the rest.
    """

    def __init__(self, model: Any, layers: Sequence[torch.nn.Module]) -> None:
        self._name = type(model).__name__
        calls: list[tuple[torch.nn.Module, Tensor, Any]] = []
        hooks = [
            module.register_forward_hook(
                lambda own, args, kwargs, output: calls.append((own, _hidden(args, kwargs), output)), with_kwargs=True
            )
            for layer in layers
            for module in (layer, *layer.children())
        ]
        probe = attention.Probe()
        token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
        try:
            with torch.inference_mode():
                model(input_ids=token, position_ids=token, use_cache=False, packed=probe)
        finally:
            for hook in hooks:
                hook.remove()
        seen = {module: (entering, output) for module, entering, output in calls}
        self._layers = [self._look(index, layer, probe.modules[index], seen) for index, layer in enumerate(layers)]
        self._patches: dict[SkippedLayers, list[tuple[torch.nn.Module, Forward]]] = {}

    def _look(self, index: int, layer: torch.nn.Module, inner: Any, seen: dict[torch.nn.Module, Any]) -> _Layer:
        children = [child for child in layer.children() if child in seen]
        holders = [child for child in children if any(module is inner for module in child.modules())]
        if layer not in seen or not holders:
            raise ValueError(
                f"{self._name}: the attention of layer {index} is no part of its own; expected a layer that calls an "
                "attention module"
            )
        weighty = [
            child
            for child in children
            if child is not holders[0] and any(parameter.dim() > 1 for parameter in child.parameters())
        ]
        return _Layer(
            [(layer, _passing(seen[layer][1]))],
            _without(holders[0], children, seen),
            _without(weighty[0], children, seen) if len(weighty) == 1 else None,
        )

    @contextmanager
    def skipping(self, skip: SkippedLayers) -> Iterator[None]:
        """While entered, forward passes leave these sub-blocks out. Raises ValueError for what cannot be."""
        patches = self._patches.get(skip)
        if patches is None:
            patches = self._patches[skip] = self._collect(skip)
        before = [module.__dict__.get("forward") for module, _ in patches]  # somebody may have given one to a module
        try:
            for module, forward in patches:
                module.__dict__["forward"] = forward  # shadows the class's; the module's own setattr is slow
            yield
        finally:
            for (module, _), own in zip(patches, before, strict=True):
                if own is None:
                    module.__dict__.pop("forward", None)
                else:
                    module.__dict__["forward"] = own

    def _collect(self, skip: SkippedLayers) -> list[tuple[torch.nn.Module, Forward]]:
        skip.check(len(self._layers))
        found = []
        for index, layer in enumerate(self._layers):
            without_attention, without_mlp = index in skip.attention, index in skip.mlp
            if without_attention and without_mlp:
                found += layer.whole
            elif without_attention:
                found += layer.attention
            elif without_mlp:
                if layer.mlp is None:
                    raise ValueError(
                        f"{self._name}: the MLP of layer {index} is no part of its own and cannot be skipped alone; "
                        "skip attention or whole layers"
                    )
                found += layer.mlp
        return found


def _hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0] if args else kwargs.get("hidden_states")


def _wrapped(like: Any) -> Callable[[Tensor], Any]:
    """Puts a tensor where a module's output has it."""
    rest = (None,) * (len(like) - 1) if isinstance(like, tuple) else None
    return (lambda hidden: hidden) if rest is None else (lambda hidden: (hidden, *rest))


def _passing(like: Any) -> Forward:
    """A forward that hands the hidden states on."""
    wrapped = _wrapped(like)
    return lambda *args, **kwargs: wrapped(_hidden(args, kwargs))


def _without(
    block: torch.nn.Module, children: Sequence[torch.nn.Module], seen: dict[torch.nn.Module, Any]
) -> list[tuple[torch.nn.Module, Forward]]:
    """A block that adds nothing, and the norm in front of it that does nothing, where it feeds this block alone."""
    entering, output = seen[block]
    wrapped = _wrapped(output)

    def nothing(*args: Any, **kwargs: Any) -> Any:
        return wrapped(torch.zeros_like(_hidden(args, kwargs)))

    found: list[tuple[torch.nn.Module, Forward]] = [(block, nothing)]
    feeders = [child for child in children if seen[child][1] is entering]
    fed = [child for child in children if seen[child][0] is entering]
    if len(feeders) == 1 and fed == [block]:
        found.append((feeders[0], _passing(entering)))
    return found
