"""From model names to an engine: `load`, and the loaders of models and tokenizers that it uses."""

from specdec_fast.loading.engine_builder import load
from specdec_fast.loading.model_options import ModelOptions
from specdec_fast.loading.model_sources import ASSETS, BUNDLED, is_hub_id
from specdec_fast.loading.models import check_device, load_model
from specdec_fast.loading.tokenizers import (
    check_same_tokenizer,
    eos_ids,
    lacks_chat_template,
    lacks_tokenizer,
    load_tokenizer,
)
from specdec_fast.targets.model_support import UnsupportedModelError

__all__ = [
    "ASSETS",
    "BUNDLED",
    "ModelOptions",
    "UnsupportedModelError",
    "check_device",
    "check_same_tokenizer",
    "eos_ids",
    "is_hub_id",
    "lacks_chat_template",
    "lacks_tokenizer",
    "load",
    "load_model",
    "load_tokenizer",
]
