"""Runs a transformers model without some of its attention and MLP sub-blocks.

A skipped sub-block adds nothing to the residual stream. Its norm is skipped too if it feeds only this sub-block. A
layer without both is not called. Recurrent mixers count as attention, since they too mix tokens. The data flow is
observed in one pass, so no architecture is named here. Source: Zhang et al. 2023 (Draft & Verify), section 3.1. Tests:
tests/targets/test_layer_skipping.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec_fast.targets import attention
from specdec_fast.targets.recurrent_layers import find_mixers
from specdec_fast.targets.skipped_layers import SkippedLayers

Forward = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class _Layer:
    """The replacements of one layer: pairs of a module and its forward.

    Attributes:
        full: Those that skip the whole layer. Empty if it did not run.
        attention: Those that skip its attention and its recurrent mixers. None: they are no separate modules.
        mlp: Those that skip its MLP. None: it is no separate module.
    """

    full: list[tuple[torch.nn.Module, Forward]]
    attention: list[tuple[torch.nn.Module, Forward]] | None
    mlp: list[tuple[torch.nn.Module, Forward]] | None


class LayerSkipping:
    """The sub-blocks of a target's model.

    Args:
        model: The model, with the target's attention function.
        layers: Its decoder layers.
    """

    def __init__(self, model: Any, layers: Sequence[torch.nn.Module]) -> None:
        self._name = type(model).__name__
        calls: list[tuple[torch.nn.Module, Tensor, Any]] = []
        hooks = [
            module.register_forward_hook(
                lambda own, args, kwargs, output: calls.append((own, _hidden(args, kwargs), output)), with_kwargs=True
            )
            for layer in layers
            for module in layer.modules()
        ]
        probe = attention.Probe(device=model.device)
        token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
        try:
            with torch.inference_mode(), probe.recording():
                model(input_ids=token, position_ids=token, use_cache=False, packed=probe)
        finally:
            for hook in hooks:
                hook.remove()
        seen = {module: (entering, output) for module, entering, output in calls}
        mixing = {*(call.module for call in probe.calls), *find_mixers(model)}
        self._layers = [_analyse_layer(layer, mixing, seen) for layer in layers]
        self._patches: dict[SkippedLayers, list[tuple[torch.nn.Module, Forward]]] = {}

    @contextmanager
    def skipping(self, skip: SkippedLayers) -> Iterator[None]:
        """Skips sub-blocks in all passes inside the context. Raises ValueError if one cannot be skipped."""
        patches = self._patches.get(skip)
        if patches is None:
            patches = self._patches[skip] = self._collect_patches(skip)
        before = [module.__dict__.get("forward") for module, _ in patches]  # a module may have a forward of its own
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

    def _collect_patches(self, skip: SkippedLayers) -> list[tuple[torch.nn.Module, Forward]]:
        """The replacements for a choice of sub-blocks. Raises ValueError."""
        skip.check(len(self._layers))
        found = []
        for index, layer in enumerate(self._layers):
            without_attention, without_mlp = index in skip.attention, index in skip.mlp
            if without_attention and without_mlp:
                found += layer.full
            elif without_attention or without_mlp:
                part = layer.attention if without_attention else layer.mlp
                if part is None:
                    what, other = ("attention", "MLP") if without_attention else ("MLP", "attention")
                    raise ValueError(
                        f"{self._name}: the {what} of layer {index} is not a separate module and cannot be skipped "
                        f"alone; skip its {other} or the whole layer"
                    )
                found += part
        return found


def _analyse_layer(layer: torch.nn.Module, mixing: set[torch.nn.Module], seen: dict[torch.nn.Module, Any]) -> _Layer:
    """Finds the sub-blocks of a layer in the recorded calls, given the attention modules and mixers of all layers."""
    children = [child for child in layer.children() if child in seen]
    inside = [module for module in layer.modules() if module in mixing and module in seen]
    blocks = [
        child
        for child in children
        if mixing.isdisjoint(child.modules()) and any(parameter.dim() > 1 for parameter in child.parameters())
    ]

    def patches(of: Sequence[torch.nn.Module]) -> list[tuple[torch.nn.Module, Forward]]:
        return [patch for block in of for patch in _skip_patches(block, children, seen)]

    return _Layer(
        [(layer, _identity_forward(seen[layer][1]))] if layer in seen else [],
        None if layer in inside else patches(inside),
        patches(blocks) if len(blocks) <= 1 and (inside or blocks) else None,
    )


def _hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The hidden states among a module's arguments."""
    return args[0] if args else kwargs.get("hidden_states")


def _wrap_output(like: Any) -> Callable[[Tensor], Any]:
    """Builds a function that returns a tensor in the form of a module's output."""
    rest = (None,) * (len(like) - 1) if isinstance(like, tuple) else None
    return (lambda hidden: hidden) if rest is None else (lambda hidden: (hidden, *rest))


def _identity_forward(like: Any) -> Forward:
    """A forward that returns the hidden states unchanged."""
    wrapped = _wrap_output(like)
    return lambda *args, **kwargs: wrapped(_hidden(args, kwargs))


def _skip_patches(
    block: torch.nn.Module, children: Sequence[torch.nn.Module], seen: dict[torch.nn.Module, Any]
) -> list[tuple[torch.nn.Module, Forward]]:
    """Replacements that skip a block, and the norm in front of it if that feeds only this block."""
    entering, output = seen[block]
    wrapped, width = _wrap_output(output), (output[0] if isinstance(output, tuple) else output).shape[-1]

    def zero_output(*args: Any, **kwargs: Any) -> Any:
        hidden = _hidden(args, kwargs)
        return wrapped(hidden.new_zeros(*hidden.shape[:-1], width))

    found: list[tuple[torch.nn.Module, Forward]] = [(block, zero_output)]
    feeders = [child for child in children if seen[child][1] is entering]
    fed = [child for child in children if seen[child][0] is entering]
    if len(feeders) == 1 and fed == [block]:
        found.append((feeders[0], _identity_forward(entering)))
    return found
