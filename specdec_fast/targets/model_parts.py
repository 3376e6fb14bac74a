"""The parts of a transformers model that heads are trained on: decoder layers, and the map from projection to logits.

Tests: tests/train/heads/test_target_states.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from specdec_fast.targets import attention
from specdec_fast.targets.load_checks import check_calls, find_decoder, observe, own_logits, sample_text
from specdec_fast.targets.model_state import ModelState
from specdec_fast.targets.model_support import check_supported
from specdec_fast.targets.output_scaling import OutputScaling, find_output_scaling
from specdec_fast.targets.recurrent_layers import MixerUse, find_mixers


@dataclass(frozen=True, slots=True)
class ModelParts:
    """Parts of a model.

    Attributes:
        layers: Its decoder layers.
        scaling: The map from the outputs of its projection to its logits. None: there is none.
    """

    layers: list[torch.nn.Module]
    scaling: OutputScaling | None


def find_model_parts(model: Any) -> ModelParts:
    """Finds the parts of a model by two passes over one token. The model stays as it is.

    Args:
        model: A transformers model with its own attention.

    Returns:
        The parts.

    Raises:
        UnsupportedModelError: If a target could not serve the model.
    """
    check_supported(model)
    attention.register()
    state, sample = ModelState(model), sample_text(model, 1)
    mixers: list[Any] = find_mixers(model)
    use = MixerUse(model, mixers)
    try:
        attention.use_attention(model, attention.PROBE_NAME)
        calls = observe(model, sample, torch.zeros_like(sample)).calls
    finally:
        use.release()
        state.restore()
    check_calls(model, calls, bool(mixers))
    count = int(model.config.get_text_config().num_hidden_layers)
    inner: list[tuple[int, Any]] = [(call.layer, call.module) for call in calls]
    found = find_decoder(model, [*inner, *((int(mixer.layer_idx), mixer) for mixer in mixers)])
    if found is None:
        return ModelParts([], None)
    states = []
    hook = found[0].register_forward_hook(lambda _module, _args, output: states.append(output[0][0]))
    try:
        logits = own_logits(model, sample)
    finally:
        hook.remove()
    return ModelParts(list(found[1])[:count], find_output_scaling(model, states[0], logits) if states else None)
