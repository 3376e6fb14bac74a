"""Loads models of transformers: bundled ones, folders, and hub ids. Tests: tests/test_loading.py."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from specdec_fast.targets.model_support import UnsupportedModelError
from specdec_kernels.unknown_names import closest, unknown_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ASSETS = Path(__file__).parents[1] / "assets"
BUNDLED = {"demo-target": ASSETS / "demo-target", "demo-draft": ASSETS / "demo-draft"}
EXPECTED = f"expected a bundled name ({', '.join(BUNDLED)}), a folder with config.json and weights"
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


def resolve_dtype(name: str | torch.dtype) -> torch.dtype:
    """Returns the dtype of a name. Raises ValueError for an unknown name."""
    if isinstance(name, torch.dtype):
        return name
    if name not in DTYPES:
        raise ValueError(unknown_name("dtype", name, DTYPES))
    return DTYPES[name]


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
    source: str | Path, dtype: str | torch.dtype = "float32", device: str = "cpu", *, what: str = "model"
) -> PreTrainedModel:
    """Loads a causal language model of transformers.

    Args:
        source: A bundled name ("demo-target", "demo-draft"), a folder, or a hub id.
        dtype: Dtype of the weights.
        device: Device of the weights.
        what: Name of the model in messages.

    Returns:
        The model in evaluation mode.

    Raises:
        ValueError: If there is no such model, if it cannot be loaded, or if its weights are incomplete.
        UnsupportedModelError: If it is no decoder-only causal language model.
    """
    from transformers import AutoModelForCausalLM

    place = BUNDLED.get(str(source), source)
    wanted = resolve_dtype(dtype)
    known = place != source or Path(source).exists()
    if not known and _is_bundled_head(str(source)):
        head = str(source).removeprefix("demo-")
        raise ValueError(f"{what}: got {str(source)!r}, a bundled head; it comes with drafter {head}; {EXPECTED}")
    meant = None if known else _closest_bundled(source)
    if meant is not None:  # a misspelt bundled name is not looked up on the hub
        raise ValueError(f"{what}: got {str(source)!r}; {EXPECTED}; did you mean {meant!r}?")
    if not known and not _HUB_ID.fullmatch(str(source)):
        raise ValueError(f"{what}: got {str(source)!r}; {EXPECTED}, or a hub id (owner/name): no such folder")
    try:
        with _no_bars() if place != source else nullcontext():  # bundled models load at once
            loaded: Any = AutoModelForCausalLM.from_pretrained(place, dtype=wanted, output_loading_info=True)
    except Exception as error:  # configs fail in more ways than can be listed
        other = _other_kind(place) if str(error).startswith("Unrecognized configuration class") else None
        if other is not None:
            expected = "expected a decoder-only causal language model; choose one (Llama, Qwen, Mistral, Gemma, ...)"
            raise UnsupportedModelError(f"{what}: got {str(source)!r}, {other}; {expected}") from error
        hub = ", or a hub id that is reachable from here (to work offline, download it first and name the folder)"
        raise ValueError(
            f"{what}: got {str(source)!r}; {EXPECTED}{'' if known else hub}: {first_line(error)}"
        ) from error
    model, found = loaded
    missing = sorted(found["missing_keys"])
    if missing:
        raise ValueError(
            f"{what} {str(source)!r}: the weights lack {len(missing)} tensors of the architecture (for example "
            f"{missing[0]}); expected a complete checkpoint; these would be random"
        )
    moved: PreTrainedModel = model.to(device).eval()
    return moved


def _closest_bundled(source: str | Path) -> str | None:
    """The bundled name that a misspelt name resembles, or None."""
    return closest(str(source), BUNDLED, cutoff=0.8)


def _is_bundled_head(name: str) -> bool:
    """Whether a name is that of a bundled head."""
    return name.startswith("demo-") and name not in BUNDLED and (ASSETS / name).is_dir()


def is_hub_id(source: str | Path) -> bool:
    """Returns whether a source can only be a hub id: it is spelt like one, and is neither bundled nor a local path."""
    name = str(source)
    is_local = name in BUNDLED or _is_bundled_head(name) or Path(name).exists()
    return not is_local and _closest_bundled(name) is None and _HUB_ID.fullmatch(name) is not None


def _other_kind(place: str | Path) -> str | None:
    """The kind of a model that is no causal language model, in words; None if its config cannot be read."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(place)
    except Exception:  # the first error is reported
        return None
    name = (getattr(config, "architectures", None) or [config.model_type])[0]
    return f"an encoder-decoder ({name})" if getattr(config, "is_encoder_decoder", False) else f"a {name}"


def first_line(error: Exception) -> str:
    """Returns the first line of an error's message, or the name of its class."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
