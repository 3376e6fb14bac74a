"""The state of a model that a target changes, and its restoration. Tests: tests/targets/test_model_state.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from specdec_fast.targets.activations import is_activation

AttentionNames = list[tuple[Any, Any]]
"""Configurations of a model and its parts, each with the name of its attention function."""


class ModelState:
    """Records what a target changes in a model: the attention function, training flags, linear layers, and activations.

    Values of weights are not recorded: a target leaves them as they are.

    Args:
        model: A transformers model.
    """

    def __init__(self, model: Any) -> None:
        self._training = [(module, module.training) for module in model.modules()]
        self._attention = [(config, config._attn_implementation_internal) for config in _configs(model)]
        self._weights = [(weight, type(weight)) for weight in model.parameters()]
        self._linear = [
            (module, module.__class__, module.weight.shape, module.weight.stride())
            for module in model.modules()
            if isinstance(module, torch.nn.Linear) and _has_strides(module.weight)
        ]
        self._activations = [(module, module.__class__) for module in model.modules() if is_activation(module)]

    def restore(self) -> None:
        """Gives the model this state back."""
        for module, training in self._training:
            module.training = training
        self.restore_attention()
        for parameter, kept in self._weights:
            if type(parameter) is not kept:
                parameter.__class__ = kept
        for activation, own in self._activations:
            activation.__class__ = own
        for module, kind, shape, stride in self._linear:
            module.__class__ = kind
            weight = module.weight
            if weight.stride() != stride and weight.shape == shape and _has_strides(weight):
                with memory_as_made(weight):
                    memory = torch.empty_strided(weight.shape, stride, dtype=weight.dtype, device=weight.device)
                    weight.data = memory.copy_(weight.data)

    def restore_attention(self) -> None:
        """Gives the model the attention of this state back, and nothing else."""
        set_attention(self._attention)

    def read_attention(self) -> AttentionNames:
        """Returns the present attention of the model, which may differ from that of this state."""
        return [(config, config._attn_implementation_internal) for config, _ in self._attention]


def set_attention(names: AttentionNames) -> None:
    """Sets the attention of configurations, as `ModelState.read_attention` returned it."""
    for config, implementation in names:
        config._attn_implementation_internal = implementation


def _configs(model: Any) -> list[Any]:
    """The configurations of a model and its parts, each once."""
    found: dict[int, Any] = {}
    waiting = [config for module in model.modules() if (config := getattr(module, "config", None)) is not None]
    while waiting:
        config = waiting.pop()
        if id(config) not in found and hasattr(config, "_attn_implementation_internal"):
            found[id(config)] = config
            waiting += [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    return list(found.values())


def _has_strides(weight: Any) -> bool:
    """Whether a weight is a plain tensor with memory of its own. Quantized ones may pack themselves when they run."""
    plain = isinstance(weight, torch.Tensor) and weight.is_floating_point() and type(weight.data) is torch.Tensor
    return plain and weight.device.type != "meta"


def memory_as_made(weight: torch.Tensor) -> torch.inference_mode:
    """Returns a context in which new memory of a weight is of its kind: made in inference mode, or outside of it.

    Memory of the other kind would take the views or the backward passes from a parameter.
    """
    return torch.inference_mode(weight.is_inference())


@contextmanager
def unchanged_on_error(model: Any) -> Iterator[ModelState]:
    """Restores a model if the block raises anything, interruptions included.

    Args:
        model: A transformers model.

    Yields:
        The state before the block.
    """
    state = ModelState(model)
    try:
        yield state
    except BaseException:
        state.restore()
        raise
