"""Hidden states of a frozen target model, as heads are trained on them.

Tests: tests/train/heads/test_target_states.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specdec_fast.targets.model_parts import find_model_parts
from specdec_fast.targets.model_support import UnsupportedModelError


class TargetStates:
    """Computes auxiliary hidden states of a frozen transformers model.

    Args:
        model: A causal language model of transformers. Its parameters are frozen.
        aux_hidden_states: Names as in `Needs.aux_hidden_states`: "final_norm" or "entering:i".

    Raises:
        ValueError: If the model has no hidden state of that name, or if no target could serve the model.
    """

    def __init__(self, model: Any, aux_hidden_states: tuple[str, ...]) -> None:
        self.model, self.aux_hidden_states = model.eval().requires_grad_(False), aux_hidden_states
        parts = find_model_parts(model)
        self._layers, self._scaling = parts.layers, parts.scaling
        count = len(parts.layers)
        for name in aux_hidden_states:
            place, _, index = name.partition(":")
            known = place == "entering" and index.isdigit() and int(index) < count
            if name != "final_norm" and not known:
                raise ValueError(
                    f"auxiliary hidden state: got {name!r}; expected 'final_norm' or 'entering:i' with i < {count}"
                )

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states."""
        return int(self.model.config.get_text_config().hidden_size)

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> dict[str, Tensor]:
        """Runs the model without gradients.

        Args:
            tokens: Token ids, int64 [B, L].

        Returns:
            Hidden states [B, L, hidden] by name.
        """
        captured: dict[str, Tensor] = {}
        hooks = []
        for name in self.aux_hidden_states:
            if name != "final_norm":

                def capture(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str = name) -> None:
                    captured[name] = args[0] if args else kwargs["hidden_states"]

                layer = self._layers[int(name.partition(":")[2])]
                hooks.append(layer.register_forward_pre_hook(capture, with_kwargs=True))
        try:
            output = self.model.base_model(input_ids=tokens, use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        if "final_norm" in self.aux_hidden_states:
            captured["final_norm"] = output[0]
        return captured

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Applies the target's LM head; gradients flow to `hidden`.

        Args:
            hidden: Hidden states after the final norm, [..., hidden].

        Returns:
            Logits, [..., V].

        Raises:
            UnsupportedModelError: If the model's logits do not follow from its projection.
        """
        if self._scaling is None:
            raise UnsupportedModelError(
                f"{type(self.model).__name__}: its logits are no scaled or capped outputs of its projection; expected "
                "such a model, since heads are trained with its projection; choose another model"
            )
        return self._scaling(self.model.get_output_embeddings()(hidden))
