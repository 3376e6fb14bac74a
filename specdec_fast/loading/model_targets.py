"""Models by name or as objects, opened as targets of an engine. Tests: tests/loading/test_given_models.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specdec_fast.loading.adapters import served_part
from specdec_fast.loading.gguf_reader import shared_gguf_reading
from specdec_fast.loading.model_options import ModelOptions
from specdec_fast.loading.model_sources import EXPECTED_OR, resolve_source
from specdec_fast.loading.models import load_model
from specdec_fast.loading.tokenizers import load_tokenizer
from specdec_fast.targets.huggingface import HuggingFaceTarget
from specdec_fast.targets.model_support import UnsupportedModelError


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model for an engine.

    Attributes:
        model: The transformers model.
        tokenizer: The tokenizer beside it, or None.
        is_given: Whether the caller passed it as an object, and gets it back.
    """

    model: Any
    tokenizer: Any
    is_given: bool

    def open(self, what: str, **arguments: Any) -> HuggingFaceTarget:
        """Opens the model as a target.

        Args:
            what: Name of the model in messages.
            **arguments: Arguments of `HuggingFaceTarget`.

        Returns:
            The target.

        Raises:
            UnsupportedModelError: If packed passes cannot serve the model. It is left as it was.
        """
        with _naming_model(what):
            target = HuggingFaceTarget(self.model, **arguments)
        if not self.is_given:  # nobody needs it after the target
            target.lease.release_explicitly()
        return target


def find_model(
    source: str | Path | torch.nn.Module,
    dtype: str | torch.dtype,
    device: str,
    what: str,
    options: ModelOptions,
    with_tokenizer: bool = True,
) -> FoundModel:
    """Loads a model by its name, or takes one that is passed.

    Args:
        source: A name that `load_model` knows, a transformers model, or a PeftModel.
        dtype: Dtype of a model that is loaded here.
        device: Device of a model that is loaded here.
        what: Name of the model in messages.
        options: Options of a model that is loaded here.
        with_tokenizer: Whether to load its tokenizer too.

    Returns:
        The model.

    Raises:
        ValueError: If it cannot be loaded, or if options are given for an object.
    """
    if isinstance(source, (str, Path)):
        is_gguf = resolve_source(source, what).gguf_file is not None
        with shared_gguf_reading() if is_gguf else nullcontext():
            model = load_model(source, dtype, device, what=what, options=options)
            return FoundModel(model, load_tokenizer(source, options) if with_tokenizer else None, False)
    if not isinstance(source, torch.nn.Module):
        raise ValueError(f"{what}: got {type(source).__name__}; {EXPECTED_OR} a loaded transformers model")
    if options.adapter is not None:
        raise ValueError(
            "adapter: got a loaded model, which stays as it is; expected the name of a model; pass "
            "PeftModel.from_pretrained(model, adapter) as the model"
        )
    if options.weights is not None:
        raise ValueError(
            f"weights: got {options.weights!r} and a loaded model, which stays as it is; expected the name of a model; "
            "specdec_fast.targets.int8_weights.quantize_linear_layers(model) quantizes a model in place"
        )
    unused = [name for name in ("revision", "device_map") if getattr(options, name) is not None] + [*options.more]
    if unused:
        raise ValueError(
            f"{unused[0]}: got it beside a loaded model; expected the name of a model, which `load` loads with it"
        )
    return FoundModel(served_part(source, what), None, True)


@contextmanager
def _naming_model(what: str) -> Iterator[None]:
    """Adds the model's role to errors about unsupported models."""
    try:
        yield
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{what}: {error}") from None
