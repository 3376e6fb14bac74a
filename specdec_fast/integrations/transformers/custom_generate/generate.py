"""Generates speculatively with specdec-fast, in place of transformers' own loop.

A repository of the hub has this file as custom_generate/generate.py. transformers runs it with trust_remote_code=True.
"""

from typing import Any

from specdec_fast.integrations.transformers import generate_attached

OPTIONS: dict[str, Any] = {}


def generate(inputs: Any = None, *args: Any, model: Any, **kwargs: Any) -> Any:
    """Generates as `model.generate` does."""
    return generate_attached(model, OPTIONS, inputs, *args, **kwargs)
