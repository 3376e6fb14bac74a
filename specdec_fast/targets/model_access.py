"""Embedding, decoder layers and projection of a target's model, for heads. Tests: tests/targets/test_huggingface.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specdec_fast.targets.model_support import UnsupportedModelError
from specdec_fast.targets.output_scaling import OutputScaling


class ModelAccess:
    """Parts of a transformers model. `HuggingFaceTarget` derives from it and sets the attributes.

    Attributes:
        model: The model.
        vocab_size: Valid token ids.
        num_layers: Decoder layers.
    """

    model: Any
    vocab_size: int
    num_layers: int
    _decoder: tuple[torch.nn.Module, torch.nn.ModuleList] | None
    _scaling: OutputScaling | None

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states."""
        return int(self.model.config.get_text_config().hidden_size)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the model and of its hidden states."""
        return self.model.dtype

    @property
    def num_embeddings(self) -> int:
        """Rows of the embedding, including padding beyond `vocab_size`."""
        weight: Any = self.model.get_input_embeddings().weight
        return int(weight.shape[0])

    @property
    def layers(self) -> torch.nn.ModuleList:
        """The decoder layers of the model, in order.

        Raises:
            UnsupportedModelError: If the model has no list of them.
        """
        found = self._require_decoder()[1]
        return found if len(found) == self.num_layers else found[: self.num_layers]

    def _require_decoder(self) -> tuple[torch.nn.Module, torch.nn.ModuleList]:
        """The decoder and its list of layers. Raises UnsupportedModelError."""
        if self._decoder is None:
            raise UnsupportedModelError(
                f"{type(self.model).__name__}: got no list of {self.num_layers} layers that call attention; expected "
                "one, for hidden states; choose a drafter that needs none"
            )
        return self._decoder

    def embed(self, tokens: Tensor) -> Tensor:
        """Returns the input embeddings of tokens int64 [...]."""
        return self.model.get_input_embeddings()(tokens)

    @property
    def why_no_lm_head(self) -> str | None:
        """Why `lm_head` is not available, or None."""
        if self._scaling is not None:
            return None
        return (
            f"{type(self.model).__name__}: its logits are no scaled or capped outputs of its projection, so heads "
            "cannot use it; choose a drafter or a head with a projection of its own"
        )

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Returns the logits [..., vocab_size] of hidden states [..., hidden] named "final_norm".

        Raises:
            UnsupportedModelError: If `why_no_lm_head` is not None.
        """
        if self._scaling is None:
            raise UnsupportedModelError(str(self.why_no_lm_head))
        return self._scaling(self.model.get_output_embeddings()(hidden)[..., : self.vocab_size])
