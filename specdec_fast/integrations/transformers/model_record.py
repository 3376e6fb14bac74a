"""The parts of an attached model, to find what was replaced since: an engine reads the weights that it was built with.

Values that change in place are followed. Tests: tests/integrations/transformers/test_replaced_parts.py.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from specdec_fast.targets.weight_changes import address_of

_AS_ATTACHED = "expected the parts with which it was attached"


class ModelRecord:
    """The modules of a model, their forward hooks, and the memory of their weights and buffers.

    Args:
        model: The model as its engine prepared it.
    """

    def __init__(self, model: nn.Module) -> None:
        named = [*model.named_modules()]  # listed once: walking through the modules takes longer than all the rest
        self._modules = [(name, module, _describe(module), tuple(module._modules.values())) for name, module in named]
        self._tensors = [
            (f"{name}.{key}".lstrip("."), holder, key, tensor, None if tensor is None else _memory(tensor))
            for name, module in named
            for holder in _holders(module)
            for key, tensor in holder.items()
        ]

    def find_change(self) -> str | None:
        """Returns what was got and expected if a part is another one now, or None."""
        for name, holder, key, tensor, memory in self._tensors:
            present = holder.get(key)
            if present is tensor and (present is None or _memory(present) == memory):
                continue
            if present is None or memory is None:
                return f"a model with {name} added or removed; {_AS_ATTACHED}"
            now, then = _in_words(_memory(present)), _in_words(memory)
            if now != then:
                return f"a model with {name} of {now}; expected {then}, as when it was attached"
            return f"a model with {name} in other memory; expected its values to change in place"
        for name, module, description, children in self._modules:
            found = _describe(module)
            if found != description or tuple(module._modules.values()) != children:
                place = name or "the model"
                if found[-1] != description[-1]:
                    return f"a model with other forward hooks of {place}; expected those with which it was attached"
                return f"a model with other modules or weights in {place}; {_AS_ATTACHED}"
        return None


def _describe(module: nn.Module) -> tuple[Any, ...]:
    """What an engine relies on in a module besides tensors: type, forward, numbers of tensors, and hooks of users."""
    own = module.__dict__
    late, early = own["_forward_hooks"], own["_forward_pre_hooks"]
    hooks: tuple[Any, ...] = ()
    if late or early:
        # those of transformers come and go: they record states for callers of the model's forward
        every = (*late.values(), *early.values())
        hooks = tuple(each for each in every if not str(getattr(each, "__module__", "")).startswith("transformers."))
    return type(module), own.get("forward"), len(own["_parameters"]), len(own["_buffers"]), hooks


def _holders(module: nn.Module) -> tuple[dict[str, Tensor | None], ...]:
    """The dictionaries that hold weights and buffers of a module."""
    found: Any = module._parameters, module._buffers
    return found


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.device, tensor.shape, tensor.is_contiguous(), address_of(tensor)


def _in_words(memory: tuple[Any, ...]) -> str:
    dtype, device, shape = memory[:3]
    return f"{dtype} on {device} with shape {[*shape]}"
