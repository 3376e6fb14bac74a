"""Why transformers could not load a model, in words with a remedy. Tests: tests/loading/test_load_failures.py."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec_fast.loading.error_text import first_line
from specdec_fast.loading.gguf_reader import QUANTIZATIONS, readable_architectures
from specdec_fast.loading.model_sources import EXPECTED, EXPECTED_OR, ModelSource
from specdec_fast.targets.model_support import UnsupportedModelError

_HUB = "a hub id that is reachable from here (to work offline, download it first and name the folder)"
_NO_WEIGHTS = "no file named", "does not appear to have"
_CHECKPOINT = "use the original checkpoint (config.json and safetensors)"
_EXPECTED_DECODER = "expected a decoder-only causal language model; choose one (Llama, Qwen, Mistral, Gemma, ...)"
_NOT_SERVED = ("lfm2", "mamba", "t5")
"""Architectures of GGUF files that transformers reads, and that are refused for a better reason."""


def explain_failure(
    error: Exception,
    source: ModelSource,
    what: str,
    files: Mapping[str, Any],
    arguments: Mapping[str, Any],
) -> ValueError:
    """Returns the error for a model that could not be loaded.

    Args:
        error: What transformers raised.
        source: The model.
        what: Name of the argument in messages.
        files: Arguments of from_pretrained that say where files are.
        arguments: All arguments that from_pretrained got.

    Returns:
        UnsupportedModelError if the model is no causal language model, else ValueError.
    """
    got, words = f"{what}: got {source.name!r}", str(error)
    device_map, quantization = arguments.get("device_map"), arguments.get("quantization_config")
    if "trust_remote_code" in words:
        return ValueError(
            f"{got}, a checkpoint with Python code of its own; expected trust_remote_code=True, which runs that code; "
            "read it first, or choose a checkpoint that transformers knows without it"
        )
    if device_map is not None and any(each in words.lower() for each in ("device", "cuda", "offload")):
        return ValueError(
            f"device_map: got {device_map!r} for {source.name!r}: {first_line(error)}; expected 'auto', a device of "
            "this machine, or devices by module; layers on disk also need model_options={'offload_folder': ...}"
        )
    if source.gguf_file is not None:
        return _explain_gguf(error, got)
    if source.is_local and not (Path(source.place) / str(files.get("subfolder", "")) / "config.json").is_file():
        return ValueError(f"{got}, a folder without config.json; {EXPECTED}")
    config = _raw_config(source, files)
    if words.startswith("Unrecognized configuration class"):
        return UnsupportedModelError(f"{got}, {_kind(config)}; {_EXPECTED_DECODER}")
    unknown = re.search(r"unexpected keyword argument '(\w+)'", words)
    if unknown is not None and unknown[1] in arguments:
        return ValueError(f"model_options: {first_line(error)}; expected arguments of from_pretrained; leave it out")
    if quantization is not None and not isinstance(error, OSError):
        return ValueError(
            f"model_options: got quantization_config={type(quantization).__name__} for {source.name!r}: "
            f"{first_line(error)}; expected a quantization that transformers can run here; install what it names, or "
            "pass another quantization_config"
        )
    kind = (config.get("quantization_config") or {}).get("quant_method")
    if kind is not None and not isinstance(error, OSError):
        return ValueError(
            f"{got}, whose weights are quantized by {kind}: {first_line(error)}; expected a quantization that "
            "transformers can run here; install what it names, or choose the checkpoint without quantization"
        )
    if not source.is_local and any(each in words for each in _NO_WEIGHTS):
        return ValueError(
            f"{got}; {EXPECTED_OR} {_HUB}: {first_line(error)}; if it has GGUF files, name one: {source.name}:FILE.gguf"
        )
    if not source.is_local:
        return ValueError(f"{got}; {EXPECTED_OR} {_HUB}: {first_line(error)}")
    remedy = "correct them, or download them again"
    if "does not recognize this architecture" in words:
        remedy = "update transformers, or choose another model"
    return ValueError(
        f"{got}, a folder that transformers cannot load: {first_line(error)}; expected config.json and weights of one "
        f"causal language model; {remedy}"
    )


def explain_architecture(source: ModelSource, what: str, architecture: str) -> ValueError | None:
    """Returns the error for a GGUF file of an architecture that cannot be read; None if it may be read.

    Args:
        source: The model.
        what: Name of the argument in messages.
        architecture: The architecture in its header.
    """
    known = readable_architectures()
    if architecture in known:
        return None
    served = ", ".join(name for name in known if name not in _NOT_SERVED)
    return ValueError(
        f"{what}: got {source.name!r}, a GGUF file of architecture {architecture!r}; expected one that transformers "
        f"reads ({served}); {_CHECKPOINT}"
    )


def _explain_gguf(error: Exception, got: str) -> ValueError:
    """The error for a GGUF file that transformers cannot read."""
    words, checkpoint = first_line(error), _CHECKPOINT
    if words.startswith("Unrecognized configuration class"):
        return UnsupportedModelError(f"{got}, which is a model of another kind; {_EXPECTED_DECODER}")
    if ("architecture" in words and "not supported" in words) or "gguf model_type" in words:
        return ValueError(f"{got}: {words}; expected an architecture that transformers reads; {checkpoint}")
    if isinstance(error, NotImplementedError) or "ggml type" in words:
        return ValueError(f"{got}: {words}; expected {QUANTIZATIONS}; convert it with llama-quantize, or {checkpoint}")
    return ValueError(f"{got}, a GGUF file that transformers cannot read: {words}; {checkpoint}")


def _raw_config(source: ModelSource, files: Mapping[str, Any]) -> dict[str, Any]:
    """The contents of config.json; empty if it cannot be read."""
    from transformers import PreTrainedConfig

    try:
        found, _ = PreTrainedConfig.get_config_dict(source.place, **files)
    except Exception:  # the first error is reported
        return {}
    return dict(found)


def _kind(config: dict[str, Any]) -> str:
    """The kind of a model that is no causal language model, in words."""
    name = (config.get("architectures") or [config.get("model_type", "model of another kind")])[0]
    return f"an encoder-decoder ({name})" if config.get("is_encoder_decoder") else f"a {name}"
