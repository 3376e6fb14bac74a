"""Checkpoints of trained heads: a local folder or a hub id, safetensors or .bin, one file or shards.

This module knows files, names and shapes, but no architecture. The layouts of each family are in modules beside it, for
example `checkpoint_medusa.py`. Tests: tests/heads/test_checkpoint.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn

SAFETENSORS, PICKLED = (".safetensors",), (".bin", ".pt", ".pth")
ASSETS = Path(__file__).parents[1] / "assets"
NAMES = ("model.safetensors", "pytorch_model.bin")
"""Names of weight files, each alone or as shards with an index, in order of preference."""
_PLAIN = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_SCALES = re.compile(r"[._](?:weight_scale\w*|input_scale|weight_packed|qweight|qzeros|scales|absmax|SCB)$")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The configuration and the tensors of a head, as stored.

    Attributes:
        source: Folder or hub id, as the user named it.
        folder: Local folder.
        config: Content of config.json.
        tensors: Tensors by key.
    """

    source: str
    folder: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]

    def field(
        self,
        name: str,
        kind: type | tuple[type, ...],
        default: Any = None,
        among: Mapping[str, Any] | None = None,
    ) -> Any:
        """Returns a field of config.json.

        Args:
            name: Name of the field.
            kind: Expected type.
            default: Value for an absent field, or null.
            among: Fields of a nested object, in place of those of config.json.

        Returns:
            The value.

        Raises:
            ValueError: If the value has another type.
        """
        found = (self.config if among is None else among).get(name)
        if found is None:
            return default
        if not isinstance(found, kind) or (kind is int and isinstance(found, bool)):
            wanted = " or ".join(each.__name__ for each in (kind if isinstance(kind, tuple) else (kind,)))
            raise ValueError(
                f"{self.folder / 'config.json'}: field {name!r} is {found!r}; expected {wanted}; correct the file"
            )
        return found


def open_checkpoint(
    source: str | Path,
    *,
    names: Sequence[str] = NAMES,
    keep: Callable[[str], bool] = lambda key: True,
    absent: str = "belongs to such a head; is this the checkpoint of another one?",
) -> Checkpoint:
    """Reads a head from a folder or a hub id. Tensors stay on the CPU, in the dtype of the file.

    Args:
        source: Folder, name of a bundled head, or hub id.
        names: Names of weight files, in order of preference.
        keep: Which keys to read, for files that hold a whole model too.
        absent: End of the message if there is no such key.

    Returns:
        The checkpoint.

    Raises:
        ValueError: If the place does not exist, a hub id cannot be reached, files are missing, truncated or contain
            pickled code, there is no key to read, or the weights are quantized.
    """
    folder = find_folder(source, names)
    config = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    tensors: dict[str, Tensor] = {}
    files = weight_files(folder, names, keep)
    for file in files:
        for key, value in read_tensors(file, keep):
            if key in tensors:
                raise ValueError(f"{file}: key {key!r} is in an earlier shard too; expected every key once")
            tensors[key] = value
    if not tensors:
        listed = ", ".join(file.name for file in files) or "the index"
        raise ValueError(f"{folder}: no key of {listed} {absent}")
    _refuse_quantized(folder, tensors)
    return Checkpoint(str(source), folder, config, tensors)


def _refuse_quantized(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Refuses quantized weights: without their scales they would be other numbers. Raises ValueError."""
    odd = next(
        (
            key
            for key, value in tensors.items()
            if _SCALES.search(key) or (value.dim() > 1 and value.dtype not in _PLAIN)
        ),
        None,
    )
    if odd is not None:
        raise ValueError(
            f"{folder}: got quantized weights ({odd} is {str(tensors[odd].dtype).removeprefix('torch.')}); expected "
            "float32, bfloat16 or float16: quantized heads are not supported; take the head's unquantized checkpoint"
        )


def find_folder(source: str | Path, names: Sequence[str] = NAMES) -> Path:
    """Returns the folder of a checkpoint: a local or bundled one, or the download of a hub id. Raises ValueError."""
    place = Path(source)
    if not place.is_dir() and place.name == str(source) and (ASSETS / place).is_dir():
        place = ASSETS / place
    if place.is_dir():
        return place
    if place.exists():
        raise ValueError(f"head: got {str(source)!r}, a file; expected the folder that it is in, with config.json")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    patterns = ["config.json", *(pattern for name in names for pattern in (name, *_shard_patterns(name)))]
    try:
        return Path(snapshot_download(str(source), allow_patterns=patterns))
    except HFValidationError:
        reason = "no such folder, and no hub id"
    except (OSError, ValueError) as error:  # not found, gated, offline: all of the hub's errors are among these
        reason = f"{type(error).__name__}: {(str(error).strip() or 'no reason given').splitlines()[0]}"
    raise ValueError(
        f"head: got {str(source)!r}; expected a folder with config.json and {' or '.join(names)}, or a hub id that is "
        f"reachable from here (to work offline, download it first and name the folder): {reason}"
    )


def _shard_patterns(name: str) -> tuple[str, str]:
    stem, _, suffix = name.rpartition(".")
    return f"{stem}-*-of-*.{suffix}", f"{name}.index.json"


def weight_files(
    folder: Path, names: Sequence[str] = NAMES, keep: Callable[[str], bool] = lambda key: True
) -> list[Path]:
    """Returns the weight files of a folder; of shards, those with a wanted key.

    Args:
        folder: The folder.
        names: Names of weight files, in order of preference.
        keep: Which keys are wanted.

    Returns:
        The files.

    Raises:
        ValueError: If there are none, or if a shard is missing.
    """
    for name in names:
        if (folder / name).is_file():
            return [folder / name]
        index = folder / f"{name}.index.json"
        if index.is_file():
            mapped = read_json(index).get("weight_map")
            if not isinstance(mapped, dict) or not mapped:
                raise ValueError(f"{index}: no 'weight_map'; expected an object from keys to files")
            shards = sorted({str(shard) for key, shard in mapped.items() if keep(key)})
            gone = [shard for shard in shards if Path(shard).name != shard or not (folder / shard).is_file()]
            if gone:
                raise ValueError(f"{index}: it names {gone[0]}, which is not in the folder; download the whole of it")
            return [folder / shard for shard in shards]
    inside = ", ".join(sorted(file.name for file in folder.iterdir())[:8]) or "nothing"
    raise ValueError(f"{folder}: got {inside}; expected {' or '.join(names)}, or shards with an index")


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file. Raises ValueError for other content."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: this is no JSON: {error}; download it again") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: got {type(found).__name__}; expected a JSON object")
    return found


def read_tensors(file: Path, keep: Callable[[str], bool] = lambda key: True) -> Iterator[tuple[str, Tensor]]:
    """Yields (key, tensor) of one file. Pickled code in a .bin file is never run. Raises ValueError."""
    if file.suffix in SAFETENSORS:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(file, framework="pt") as opened:
                for key in opened.keys():  # noqa: SIM118 (no mapping)
                    if keep(key):
                        yield key, opened.get_tensor(key)
        except SafetensorError as error:
            raise ValueError(f"{file}: this is no whole safetensors file: {error}; download it again") from None
        return
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        raise ValueError(
            f"{file}: it holds pickled code or objects, and they are not run; expected tensors only; convert it to "
            f"safetensors where you trust it ({str(error).strip().splitlines()[0]})"
        ) from None
    except (RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"{file}: this is no whole PyTorch file: {reason}; download it again") from None
    if isinstance(found, dict) and isinstance(found.get("state_dict"), dict):
        found = found["state_dict"]
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise ValueError(f"{file}: got {type(found).__name__}; expected names with tensors")
    yield from ((key, value) for key, value in found.items() if keep(key))


def load_tensors(
    module: nn.Module,
    tensors: Mapping[str, Tensor],
    source: str,
    *,
    optional: Iterable[str] = (),
    named: Callable[[str], str] = str,
) -> None:
    """Copies tensors into a module by name, in the module's dtype and device.

    Args:
        module: The module.
        tensors: Tensors by name.
        source: Name of the head, for messages.
        optional: Names that may be missing; they keep their values.
        named: Maps our name to that of the file, for messages.

    Raises:
        ValueError: If keys are missing, unknown or of another shape. The message names them all.
    """
    wanted = module.state_dict()
    may_miss = set(optional)
    missing = sorted(named(key) for key in wanted if key not in tensors and key not in may_miss)
    extra = sorted(named(key) for key in tensors if key not in wanted)
    shaped = sorted(key for key in tensors if key in wanted and tensors[key].shape != wanted[key].shape)
    found = [f"missing: {_list_keys(missing)}"] * bool(missing) + [f"nothing reads: {_list_keys(extra)}"] * bool(extra)
    found += [f"{named(key)} is {list(tensors[key].shape)}, expected {list(wanted[key].shape)}" for key in shaped[:4]]
    if found:
        remedy = (
            "is this a head for this target?"
            if shaped
            else "download it again if it is incomplete; otherwise its layout is not supported"
        )
        raise ValueError(f"head {source}: its tensors do not fit: {'; '.join(found)}; {remedy}")
    for key, value in tensors.items():
        if wanted[key].is_floating_point() and not bool(torch.isfinite(value.float()).all()):
            raise ValueError(f"head {source}: {named(key)} holds numbers that are not finite; download it again")
    with torch.no_grad():
        for key, value in tensors.items():
            wanted[key].copy_(value)


def _list_keys(keys: Sequence[str], most: int = 6) -> str:
    return ", ".join(keys[:most]) + (f" and {len(keys) - most} more" if len(keys) > most else "")


def refuse_other_size(source: str, what: str, got: int, expected: int, remedy: str) -> None:
    """Checks that a size of a head equals the target's. Raises ValueError."""
    if got != expected:
        raise ValueError(f"head {source}: {what} is {got}, the target's is {expected}; {remedy}")


def write_checkpoint(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], name: str) -> None:
    """Writes config.json and a safetensors file. Each file is either complete or the old one.

    Args:
        folder: The folder.
        config: Content of config.json.
        tensors: Tensors by key.
        name: Name of the safetensors file.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{name}.partial"
    save_file({key: value.detach().contiguous().cpu() for key, value in tensors.items()}, partial, {"format": "pt"})
    partial.replace(folder / name)
    described = folder / "config.json.partial"
    described.write_text(json.dumps(dict(config), indent=2) + "\n", encoding="utf-8")
    described.replace(folder / "config.json")


def bundled_head(target: Any, kind: str) -> Path:
    """Returns the folder of the head of a kind that is bundled for a target. Raises ValueError if there is none."""
    model = Path(str(getattr(target, "model_id", "")))
    place = ASSETS / f"demo-{kind}"
    if (place / "config.json").is_file() and model.name == read_json(place / "config.json")["base_model_name_or_path"]:
        return place
    raise ValueError(
        f"{kind} head: got none; expected -o head=FOLDER (or a hub id), heads trained for this target; "
        "docs/guides/training-heads.md explains how to train them"
    )
