"""Hidden states that a pass returns beside its logits. Tests: tests/targets/test_aux_hidden_states.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from specdec_fast.targets.recurrent_layers import hidden_states_of


def entered_layer(name: str, num_layers: int) -> int:
    """Returns the number of a hidden state: that of the layer it enters, or of the final norm behind all layers.

    Args:
        name: "entering:i" or "final_norm".
        num_layers: Decoder layers.

    Raises:
        ValueError: If there is no such state.
    """
    place, _, index = name.partition(":")
    if name == "final_norm":
        return num_layers + 1
    if place != "entering" or not index.isdigit() or int(index) > num_layers:
        raise ValueError(
            f"auxiliary hidden state: got {name!r}; expected 'final_norm' or 'entering:i' with i <= {num_layers}"
        )
    return int(index)


def hook_hidden_state(
    name: str, layers: torch.nn.ModuleList, decoder: Callable[[], torch.nn.Module]
) -> torch.utils.hooks.RemovableHandle:
    """Registers a hook that stores a hidden state in the context of its pass, so compiled code contains it.

    Args:
        name: "entering:i" or "final_norm".
        layers: The decoder layers.
        decoder: Returns the decoder, whose output is the final norm's.

    Returns:
        The handle that removes the hook.

    Raises:
        ValueError: If there is no such state.
    """
    index = entered_layer(name, len(layers))
    if index > len(layers):

        def store_output(_module: Any, _args: Any, kwargs: dict[str, Any], output: Any) -> None:
            hidden_states_of(kwargs)[name] = output[0][0]

        return decoder().register_forward_hook(store_output, with_kwargs=True)
    if index == len(layers):  # behind the last layer, before the final norm

        def store_last(_module: Any, _args: Any, kwargs: dict[str, Any], output: Any) -> None:
            hidden_states_of(kwargs)[name] = (output[0] if isinstance(output, tuple) else output)[0]

        return layers[-1].register_forward_hook(store_last, with_kwargs=True)

    def store_input(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        hidden_states_of(kwargs)[name] = hidden[0]

    return layers[index].register_forward_pre_hook(store_input, with_kwargs=True)
