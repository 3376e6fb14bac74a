"""Notices changes of a model's weights between calls, so that stored keys and values are not used after a change.

Tests: tests/targets/test_weight_changes.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_SAMPLES = 2
"""Elements of each weight that are compared. Writes through `.data` change no version counter."""


class WeightChanges:
    """Compares addresses, version counters and a few elements of all weights with those of the last call.

    A change that keeps all of them is not seen, nor are replaced weights, switched adapters and hooks.

    Args:
        model: A module.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._weights: list[Tensor] = []  # listed once: walking through the modules takes longer than all the rest
        self._places: list[int] = []
        self._versions: list[int] = []
        self._views: list[Tensor] = []
        self._values: list[Tensor] = []

    def __getstate__(self) -> dict[str, Any]:
        """A copy begins anew, since the views of this object show the original's weights."""
        return {**vars(WeightChanges(self._model))}

    def __call__(self) -> bool:
        """Returns whether weights have changed since the last call; False for the first call."""
        is_first = not self._weights
        if is_first:
            self._weights = [*self._model.parameters(), *self._model.buffers()]
        places, versions = [*map(address_of, self._weights)], [*map(_version, self._weights)]
        if places != self._places:
            self._views = [view for each in self._weights if (view := _sample(each)) is not None]
        values = _concatenate(self._views)
        same = (
            places == self._places
            and versions == self._versions
            and all(torch.equal(new, old) for new, old in zip(values, self._values, strict=True))
        )
        self._places, self._versions, self._values = places, versions, values
        return not (same or is_first)


def address_of(weight: Tensor) -> int:
    """The address of the memory, 0 if the type of tensor has none."""
    try:
        return weight.data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def _version(weight: Tensor) -> int:
    """The version counter. Inference tensors have none."""
    return 0 if weight.is_inference() else weight._version


def _sample(weight: Tensor) -> Tensor | None:
    """A view of some elements; None for types of tensors that have no plain memory."""
    if type(weight) not in (Tensor, torch.nn.Parameter) or weight.is_meta or not weight.numel():
        return None
    own = weight.detach()
    flat = own if own.is_contiguous() else own.T if own.dim() == 2 else None
    if flat is None or not flat.is_contiguous():
        return None
    flat = flat.view(-1)
    step = max(flat.numel() // _SAMPLES, 1)
    return flat[step // 2 :: step][:_SAMPLES]


def _concatenate(views: list[Tensor]) -> list[Tensor]:
    """The bytes of all views, one tensor per device and dtype: NaN equals itself."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for view in views:
        groups.setdefault((view.device, view.dtype), []).append(view)
    return [torch.cat(group).view(torch.uint8) for group in groups.values()]
