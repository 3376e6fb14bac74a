"""The map from the outputs of a model's projection to its logits: a scale and a soft cap, found by comparison.

Granite, Cohere, MiniCPM and Gemma scale or cap logits, each under another name and in another way. Heads that use the
target's projection need the same map. Tests: tests/targets/test_output_scaling.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec_fast.targets.model_support import UnsupportedModelError

_LINEAR_PART = 0.9  # share of a cap up to which tanh is inverted
# largest error in units of the logits' spread
_TOLERANCES = {torch.float64: 1e-4, torch.float32: 1e-3}
_HALF_TOLERANCE = 0.1


@dataclass(frozen=True, slots=True)
class OutputScaling:
    """Scales the outputs of a projection, then caps them softly.

    Attributes:
        scale: Factor.
        cap: Soft cap, or None.
    """

    scale: float = 1.0
    cap: float | None = None

    def __call__(self, projected: Tensor) -> Tensor:
        """Returns the logits of projected states, in the same shape and dtype."""
        logits = projected if self.scale == 1.0 else projected * self.scale
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


@torch.no_grad()
def find_output_scaling(model: Any, hidden: Tensor, logits: Tensor) -> OutputScaling | None:
    """Finds the map that gives a model's logits.

    Args:
        model: A transformers model.
        hidden: States after its final norm, [N, hidden].
        logits: Its logits of them, [N, V].

    Returns:
        The map, or None if the logits are no scaled and capped outputs of the projection.
    """
    try:
        projected = model.get_output_embeddings()(hidden)
    except RuntimeError:  # states of another size
        return None
    width = min(projected.shape[-1], logits.shape[-1])
    found, wanted = projected[..., :width].float(), logits[..., :width].float()
    limit = _TOLERANCES.get(model.dtype, _HALF_TOLERANCE) * float(wanted.std(correction=0))
    settings = _numbers(model.config.get_text_config())
    caps = [value for name, value in settings if "cap" in name and "attn" not in name and value > 0]
    if not caps and float((found - wanted).abs().max()) <= limit:
        return OutputScaling()
    maps = []
    for cap in (*caps, None):
        straight, inside = wanted, torch.ones_like(wanted, dtype=torch.bool)
        if cap is not None:
            inside = wanted.abs() < _LINEAR_PART * cap
            straight = cap * torch.atanh(wanted.clamp(-_LINEAR_PART * cap, _LINEAR_PART * cap) / cap)
        x, y = found[inside], straight[inside]
        fitted = float((x * y).sum() / (x * x).sum().clamp(min=1e-30)) or 1.0
        named = [each for _, value in settings for each in (value, 1 / value) if abs(each / fitted - 1) < 0.01]
        maps += [OutputScaling(scale, cap) for scale in (1.0, *named, fitted)]
    errors = [float((each(found) - wanted).abs().max()) for each in maps]
    # named values come first, and may be worse than fitted ones by rounding
    best = next((at for at, error in enumerate(errors) if error <= 1.5 * min(errors) + 1e-6 * limit), None)  # or NaN
    return maps[best] if best is not None and errors[best] <= limit else None


def check_projection(head: Any, target: Any) -> None:
    """Checks that a head has a projection to logits: its own, or the target's.

    Args:
        head: A module of trained heads. Its `lm_head` is its own projection, or None.
        target: The target.

    Raises:
        UnsupportedModelError: If the head needs the target's and the target has no usable one.
    """
    reason = getattr(target, "why_no_lm_head", None)
    if getattr(head, "lm_head", None) is None and reason is not None:
        raise UnsupportedModelError(reason)


def _numbers(config: Any) -> list[tuple[str, float]]:
    """The numbers in a configuration, by name, without 0 and 1."""
    return [
        (name, float(value))
        for name, value in vars(config).items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value not in (0, 1)
    ]
