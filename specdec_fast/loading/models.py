"""Loads models of transformers: bundled ones, folders, GGUF files, adapters, and hub ids.

Tests: tests/loading/test_models.py, tests/loading/test_gguf.py, tests/loading/test_adapters.py.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from specdec_fast.loading.adapters import merge_adapter
from specdec_fast.loading.error_text import first_line
from specdec_fast.loading.gguf_config import check_all_weights_used, complete_config
from specdec_fast.loading.gguf_reader import (
    architecture_of,
    check_has_weights,
    end_ids,
    fetch_gguf,
    open_gguf,
    shared_gguf_reading,
)
from specdec_fast.loading.load_failures import explain_architecture, explain_failure
from specdec_fast.loading.model_options import ModelOptions
from specdec_fast.loading.model_sources import ModelSource, base_of_adapter, resolve_source
from specdec_fast.targets.int8_weights import quantize_linear_layers
from specdec_kernels.unknown_names import unknown_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger("specdec_fast")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
_SHORT = {
    "fp16": "float16", "f16": "float16", "half": "float16", "bf16": "bfloat16", "fp32": "float32", "f32": "float32",
    "float": "float32", "full": "float32", "fp64": "float64", "f64": "float64", "double": "float64",
}  # fmt: skip
"""Names of other programs -> names of PyTorch."""


def resolve_dtype(name: str | torch.dtype) -> torch.dtype:
    """Returns the dtype of a name. Raises ValueError for an unknown name, or a dtype that no model computes in."""
    if isinstance(name, torch.dtype) and name in DTYPES.values():
        return name
    if name not in DTYPES:
        meant = _SHORT.get(str(name).lower().removeprefix("torch."))
        raise ValueError(unknown_name("dtype", name, DTYPES) if meant is None else _meant(str(name), meant))
    return DTYPES[str(name)]


def _meant(name: str, meant: str) -> str:
    return f"dtype: got {name!r}; expected one of {', '.join(DTYPES)}; did you mean {meant!r}?"


def check_device(name: str | torch.device, what: str = "device") -> None:
    """Checks that a device exists and is a CPU or a CUDA GPU.

    Args:
        name: The device.
        what: Name of the option, for the message.

    Raises:
        ValueError: If the device is another one or does not exist.
    """
    device: torch.device | None
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f"{what}: got {str(name)!r}; expected cpu, cuda or cuda:N")
    available = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= available:
        raise ValueError(f"{what}: got {str(name)!r}; this machine has {available} CUDA devices; use cpu")


@contextmanager
def _no_bars() -> Iterator[None]:
    """Hides the progress bars of transformers."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def load_model(
    source: str | Path,
    dtype: str | torch.dtype = "float32",
    device: str = "cpu",
    *,
    what: str = "model",
    options: ModelOptions | None = None,
) -> PreTrainedModel:
    """Loads a causal language model of transformers.

    Args:
        source: A bundled name ("demo-target", "demo-draft", "demo-hybrid"), a folder, a GGUF file, a hub id, or the
            folder of a PEFT adapter that names its model.
        dtype: Dtype of the weights. Those of GGUF files are converted to it.
        device: Device of the weights.
        what: Name of the model in messages.
        options: Revision, trust, devices, adapter, int8 weights, and further arguments of from_pretrained.

    Returns:
        The model in evaluation mode.

    Raises:
        ValueError: If there is no such model, if it cannot be loaded, or if its weights are incomplete.
        UnsupportedModelError: If it is no decoder-only causal language model.
    """
    wanted, options = resolve_dtype(dtype), options or ModelOptions()
    options.check(device, dtype=wanted)
    found = resolve_source(source, what)
    if found.is_adapter:
        if options.adapter is not None:
            raise ValueError(
                f"{what}: got {found.name!r}, an adapter, and adapter={str(options.adapter)!r}; expected one"
            )
        return load_model(
            base_of_adapter(found, what), dtype, device, what=what, options=replace(options, adapter=found.place)
        )
    if options.revision is not None and found.is_local:
        log.warning("revision %r has no effect: %s %r is a folder of this machine", options.revision, what, found.name)
    model = _load_gguf(found, wanted, what, options) if found.gguf_file else _load(found, wanted, what, options)
    if options.adapter is not None:
        model = merge_adapter(model, options.adapter, found.name, **_places(options, "revision", "subfolder"))
    if not options.is_placed and model.device != torch.device(device):
        try:
            model = model.to(device)
        except Exception as error:  # quantized weights may stay where they are
            raise ValueError(
                f"{what}: got {found.name!r} and device {device!r}: {first_line(error)}; expected weights that can "
                f"move; pass device_map={device!r} in place of device"
            ) from error
    if options.weights is not None:
        quantize_linear_layers(model)
    moved: PreTrainedModel = model.eval()
    return moved


def _places(options: ModelOptions, *without: str) -> dict[str, Any]:
    """The arguments of from_pretrained that say where files are."""
    return {name: value for name, value in options.for_files().items() if name not in ("trust_remote_code", *without)}


def _load(source: ModelSource, dtype: torch.dtype, what: str, options: ModelOptions, **more: Any) -> Any:
    """Loads a checkpoint. `more` overrides arguments of from_pretrained. Raises ValueError."""
    from transformers import AutoModelForCausalLM

    arguments = {**options.for_model(), "dtype": dtype, "output_loading_info": True, **more}
    try:
        with _no_bars() if source.is_bundled else nullcontext():  # bundled models load at once
            loaded: Any = AutoModelForCausalLM.from_pretrained(source.place, **arguments)
    except Exception as error:  # configs fail in more ways than can be listed
        raise explain_failure(error, source, what, options.for_files(), arguments) from error
    model, found = loaded
    missing = sorted(found["missing_keys"])
    if missing:
        raise ValueError(
            f"{what} {source.name!r}: the weights lack {len(missing)} tensors of the architecture (for example "
            f"{missing[0]}); expected a complete checkpoint; these would be random"
        )
    unused = sorted(found.get("unexpected_keys") or ())
    if unused:
        log.warning(
            "%s %r: %s does not use %d tensors of the checkpoint (for example %s); check its config.json if they "
            "belong to the language model, since the text does not depend on them",
            what,
            source.name,
            type(model).__name__,
            len(unused),
            unused[0],
        )
    return model


def _load_gguf(source: ModelSource, dtype: torch.dtype, what: str, options: ModelOptions) -> Any:
    """Loads a GGUF file, with weights converted to a dtype. Raises ValueError."""
    from transformers import AutoConfig, GgufConfig

    arguments: dict[str, Any] = {"quantization_config": GgufConfig(dequantize=True)}
    with shared_gguf_reading():
        try:
            path = fetch_gguf(source, _places(options))
        except OSError as error:
            raise explain_failure(error, replace(source, gguf_file=None), what, options.for_files(), {}) from error
        reader = open_gguf(path, what)
        if (wrong := explain_architecture(source, what, architecture_of(reader))) is not None:
            raise wrong
        check_has_weights(reader, f"{what}: got {source.name!r}")
        local = replace(source, place=path.parent, gguf_file=path.name)
        try:
            config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        except Exception as error:
            raise explain_failure(error, local, what, {}, {}) from error
        try:
            complete_config(config, reader)
            model = _load(local, dtype, what, options, config=config, gguf_file=path.name, subfolder="", **arguments)
            check_all_weights_used(model, reader)
        except ValueError as error:
            if str(error).startswith(what):
                raise
            raise ValueError(f"{what}: got {source.name!r}: {error}") from error
        ends = end_ids(reader)
        if len(ends) > 1 and getattr(model, "generation_config", None) is not None:
            model.generation_config.eos_token_id = ends
    model.config.name_or_path = str(path)
    return model
