"""Opens GGUF files with the package `gguf`, whose parsed header all parts of transformers share.

Tests: tests/loading/test_gguf.py.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from specdec_fast.extras import require
from specdec_fast.loading.model_sources import ModelSource, split_words

_LOCK = threading.RLock()
_sharing = False
_MAGIC = b"GGUF"
QUANTIZATIONS = "a quantization type that transformers reads (Q4_0 to Q8_0, Q2_K to Q6_K, F16, ...)"


@contextmanager
def shared_gguf_reading() -> Iterator[None]:
    """Makes transformers parse the header of each GGUF file once inside the block, in place of three to four times.

    Headers hold the whole vocabulary and take seconds to parse. Nested blocks share with the outermost one, which drops
    the headers at its end. Nothing happens without the package `gguf`.
    """
    global _sharing
    with _LOCK, ExitStack() as leaving:
        if not _sharing:
            try:
                import gguf
            except ImportError:
                yield
                return
            _sharing = True
            leaving.callback(_end_sharing)
            _replace(leaving, gguf, "GGUFReader", cache(_quick_reader(gguf.GGUFReader)))
            _replace(leaving, gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map))
            _hide_progress(leaving)
        yield


def _end_sharing() -> None:
    global _sharing
    _sharing = False


def _replace(leaving: ExitStack, module: Any, name: str, value: Any) -> None:
    """Sets an attribute of a module until `leaving` ends."""
    leaving.callback(setattr, module, name, getattr(module, name))
    setattr(module, name, value)


def _hide_progress(leaving: ExitStack) -> None:
    """Makes the bar of transformers' GGUF loader obey its switch for progress bars."""
    from transformers import modeling_gguf_pytorch_utils as loader
    from transformers.utils import logging

    if hasattr(loader, "tqdm"):
        _replace(leaving, loader, "tqdm", logging.tqdm)


def _quick_reader(base: Any) -> Any:
    """The reader of `gguf` over a plain array: slices of a numpy memmap cost several times as much."""

    class QuickReader(base):
        @property
        def data(self) -> Any:
            return self._plain

        @data.setter
        def data(self, mapped: Any) -> None:
            import numpy

            self._plain = numpy.asarray(mapped)

    return QuickReader


def fetch_gguf(source: ModelSource, options: dict[str, Any]) -> Path:
    """Returns the path of a GGUF file, downloaded from the hub if it is there.

    Args:
        source: A source with a GGUF file.
        options: Arguments of from_pretrained that say where files are.

    Raises:
        OSError: If the hub has no such file, or cannot be reached.
    """
    if source.is_local:
        return Path(source.place) / str(source.gguf_file)
    from transformers.utils.hub import cached_file

    return Path(str(cached_file(str(source.place), str(source.gguf_file), **options)))


def check_gguf(path: Path, what: str = "model") -> None:
    """Checks what needs no parsing of a file: its first bytes, and that the packages are installed.

    Args:
        path: The file.
        what: Name of the argument in messages.

    Raises:
        ValueError: If it is no GGUF file, or if packages are missing.
    """
    with path.open("rb") as file:
        beginning = file.read(len(_MAGIC))
    if beginning != _MAGIC:
        raise ValueError(
            f"{what}: got {str(path)!r}, which is not a GGUF file (it begins with {beginning!r}); expected one of "
            "version 2 or 3; download or convert it again"
        )
    require("gguf", f"{what} {str(path)!r}")


def open_gguf(path: Path, what: str = "model") -> Any:
    """Opens a GGUF file and parses its header.

    Args:
        path: The file.
        what: Name of the argument in messages.

    Returns:
        The `gguf.GGUFReader`.

    Raises:
        ValueError: If packages are missing, or if this is no complete GGUF file.
    """
    check_gguf(path, what)
    import gguf

    try:
        reader = gguf.GGUFReader(str(path))
        architecture_of(reader)
    except Exception as error:  # broken headers fail in more ways than can be listed
        if "GGMLQuantizationType" in str(error):
            raise ValueError(
                f"{what}: got {str(path)!r}, with weights of a type that the package gguf does not know: {error}; "
                f"expected {QUANTIZATIONS}; update gguf, or convert the file with llama-quantize"
            ) from error
        words = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}"
        raise ValueError(
            f"{what}: got {str(path)!r}, which is no complete GGUF file ({words}); expected one of version 2 or 3; "
            "download or convert it again"
        ) from error
    if (parts := gguf_value(reader, "split.count", 0)) > 1:
        raise ValueError(split_words(f"{what}: got {str(path)!r}", f"one of {parts} parts", path.name))
    return reader


def check_has_weights(reader: Any, got: str) -> None:
    """Checks that a GGUF file has an embedding. transformers would fill a model of full size with random weights.

    Args:
        reader: The reader of the file.
        got: What was got, for the message.

    Raises:
        ValueError: If it has none, as files that hold a vocabulary alone.
    """
    if any(tensor.name == "token_embd.weight" for tensor in reader.tensors):
        return
    raise ValueError(
        f"{got}, a GGUF file of {len(reader.tensors)} tensors without token_embd.weight; expected the weights of a "
        "language model, not a vocabulary, an adapter or a projector alone; name the file of the model"
    )


def readable_architectures() -> list[str]:
    """Returns the architectures, as headers name them, that transformers and the package `gguf` both know."""
    from gguf import MODEL_ARCH_NAMES
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    known = {_bare(name) for name in GGUF_SUPPORTED_ARCHITECTURES}  # qwen2_moe is qwen2moe in a header
    return sorted(name for name in MODEL_ARCH_NAMES.values() if _bare(name) in known)


def _bare(name: str) -> str:
    return name.replace("_", "").replace("-", "")


def gguf_value(reader: Any, key: str, default: Any = None) -> Any:
    """Returns a value of the header.

    Args:
        reader: The reader of the file.
        key: Full name of the value.
        default: What is returned if the header lacks it.
    """
    field = reader.fields.get(key)
    return default if field is None else field.contents()


def architecture_of(reader: Any) -> str:
    """Returns the architecture that the header names. Raises KeyError if it names none."""
    return str(reader.fields["general.architecture"].contents())


def end_ids(reader: Any) -> list[int]:
    """Returns the ids of the tokens that end a text, a turn or a message, without repetition.

    transformers reads the first of them alone, and instruct models would talk on after the end of a turn.
    """
    keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
    return list(dict.fromkeys(int(value) for key in keys if (value := gguf_value(reader, key)) is not None))
