"""What the name of a model stands for: a bundled model, a folder, a GGUF file, a PEFT adapter, or a hub id.

Tests: tests/loading/test_model_sources.py.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from specdec_kernels.unknown_names import closest

ASSETS = Path(__file__).parents[1] / "assets"
BUNDLED = {name: ASSETS / name for name in ("demo-target", "demo-draft", "demo-hybrid")}
_FORMS = f"expected a bundled name ({', '.join(BUNDLED)}), a folder with config.json and weights"
EXPECTED = f"{_FORMS}, or a .gguf file"
EXPECTED_OR = f"{_FORMS}, a .gguf file, or"
"""Another form follows it."""
ADAPTER_CONFIG = "adapter_config.json"

_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_HUB_FILE = re.compile(r"(?P<repository>\w[\w.-]*/\w[\w.-]*):(?P<file>.+\.gguf)", re.IGNORECASE)
_HUB_TAG = re.compile(r"(?P<repository>\w[\w.-]*/\w[\w.-]*):(?P<tag>[\w.-]+)")
_SPLIT = re.compile(r"-\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)
_ADAPTER_WEIGHTS = "adapter_model.safetensors", "adapter_model.bin"
_WEIGHTS = "*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model comes from.

    Attributes:
        name: The name, as the caller wrote it.
        place: A folder or a hub id.
        gguf_file: Name of a GGUF file in this place, or None.
        is_local: Whether the place is a folder of this machine.
        is_bundled: Whether the model comes with this package.
    """

    name: str
    place: str | Path
    gguf_file: str | None = None
    is_local: bool = True
    is_bundled: bool = False

    @property
    def is_adapter(self) -> bool:
        """Whether this is the folder of a PEFT adapter without a model."""
        return (
            isinstance(self.place, Path)
            and (self.place / ADAPTER_CONFIG).is_file()
            and not (self.place / "config.json").is_file()
        )


def resolve_source(source: str | Path, what: str = "model") -> ModelSource:
    """Finds out what the name of a model stands for. Nothing is loaded or looked up on the hub.

    Args:
        source: A bundled name, a folder, a GGUF file, a hub id, or "owner/name:file.gguf" for a file on the hub.
        what: Name of the argument in messages.

    Returns:
        The source.

    Raises:
        ValueError: If it can be none of these, or if a folder has several GGUF files.
    """
    name = str(source)
    if name in BUNDLED:
        return ModelSource(name, BUNDLED[name], is_bundled=True)
    path = Path(source)
    if path.is_dir():
        return ModelSource(name, path, _only_gguf_file(path, name, what))
    if path.is_file():
        return _from_file(path, name, what)
    if is_bundled_head(name):
        head = name.removeprefix("demo-")
        raise ValueError(f"{what}: got {name!r}, a bundled head; it comes with drafter {head}; {EXPECTED}")
    if (meant := closest_bundled(name)) is not None:  # a misspelt bundled name is not looked up on the hub
        raise ValueError(f"{what}: got {name!r}; {EXPECTED}; did you mean {meant!r}?")
    on_hub = _HUB_FILE.fullmatch(name)
    if on_hub is not None:
        _refuse_split(Path(on_hub["file"]), name, what)
        return ModelSource(name, on_hub["repository"], on_hub["file"], is_local=False)
    if name.lower().endswith(".gguf"):
        expected = "expected a .gguf file of this machine, or owner/name:file.gguf for one on the hub"
        raise ValueError(f"{what}: got {name!r}, which does not exist; {expected}")
    tag = _HUB_TAG.fullmatch(name)
    if tag is not None:
        raise ValueError(
            f"{what}: got {name!r}; expected a hub id, or the name of a GGUF file after the colon; write "
            f"{tag['repository']}:FILE.gguf, as its page lists it"
        )
    if not _HUB_ID.fullmatch(name):
        raise ValueError(f"{what}: got {name!r}, which does not exist; {EXPECTED_OR} a hub id (owner/name)")
    return ModelSource(name, name, is_local=False)


def _from_file(path: Path, name: str, what: str) -> ModelSource:
    """The source of an existing file. Raises ValueError unless it can be a GGUF file."""
    with path.open("rb") as file:
        is_gguf = file.read(4) == b"GGUF"
    if not is_gguf and path.suffix.lower() != ".gguf":
        raise ValueError(f"{what}: got the file {name!r}; {EXPECTED}; name its folder: {path.parent}")
    _refuse_split(path, name, what)
    return ModelSource(name, path.parent, path.name)


def _only_gguf_file(folder: Path, name: str, what: str) -> str | None:
    """The GGUF file of a folder without other weights, or None. Raises ValueError for several."""
    files = sorted(file for file in folder.iterdir() if file.suffix.lower() == ".gguf" and file.is_file())
    files = [file for file in files if not file.name.lower().startswith("mmproj")]  # projectors of images
    if not files or any(next(folder.glob(pattern), None) is not None for pattern in _WEIGHTS):
        return None
    _refuse_split(files[0], name, what)
    if len(files) > 1:
        listed = ", ".join(file.name for file in files[:8]) + (", ..." if len(files) > 8 else "")
        raise ValueError(
            f"{what}: got the folder {name!r} with {len(files)} GGUF files; expected one; name the file, such as "
            f"{folder / files[0].name} ({listed})"
        )
    return files[0].name


def _refuse_split(path: Path, name: str, what: str) -> None:
    """Raises ValueError for a part of a GGUF file."""
    if _SPLIT.search(path.name):
        raise ValueError(split_words(f"{what}: got {name!r}", "one part", path.name))


def split_words(got: str, part: str, file: str) -> str:
    """Returns the message about a part of a split GGUF file."""
    return (
        f"{got}, {part} of a split GGUF file; expected a single file; join the parts with "
        f"llama-gguf-split --merge {file} OUT.gguf"
    )


def check_adapter(adapter: str | Path) -> None:
    """Checks that the name of a PEFT adapter can be a folder with one, or a hub id.

    Raises:
        ValueError: If it can be neither.
    """
    expected = "expected the folder or hub id of a PEFT adapter"
    if not isinstance(adapter, (str, Path)):
        raise ValueError(f"adapter: got {adapter!r:.60}; {expected}")
    name, path = str(adapter), Path(adapter)
    if path.is_dir() and not (path / ADAPTER_CONFIG).is_file():
        raise ValueError(f"adapter: got {name!r}, a folder without {ADAPTER_CONFIG}; {expected}")
    if path.is_dir() and not any((path / file).is_file() for file in _ADAPTER_WEIGHTS):
        files = " or ".join(_ADAPTER_WEIGHTS)
        raise ValueError(f"adapter: got {name!r}, a folder without weights; expected {files} in it; download it again")
    if not path.is_dir() and not _HUB_ID.fullmatch(name):
        raise ValueError(f"adapter: got {name!r}, {'a file' if path.exists() else 'which does not exist'}; {expected}")


def is_hub_id(source: str | Path) -> bool:
    """Returns whether a source can only be a hub id: it is spelt like one, and is neither bundled nor a local path."""
    try:
        return not resolve_source(source).is_local
    except ValueError:
        return False


def closest_bundled(source: str | Path) -> str | None:
    """Returns the bundled name that a misspelt name resembles, or None."""
    return closest(str(source), BUNDLED, cutoff=0.8)


def is_bundled_head(name: str) -> bool:
    """Returns whether a name is that of a bundled head."""
    return name.startswith("demo-") and name not in BUNDLED and (ASSETS / name).is_dir()


def base_of_adapter(source: ModelSource, what: str) -> str:
    """Returns the model that a folder of a PEFT adapter was trained for.

    Args:
        source: The folder.
        what: Name of the argument in messages.

    Raises:
        ValueError: If the adapter does not name its model.
    """
    path = Path(source.place) / ADAPTER_CONFIG
    try:
        base = json.loads(path.read_text("utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"{what}: got {source.name!r}, whose {ADAPTER_CONFIG} cannot be read: {error}") from None
    if not base:
        raise ValueError(
            f"{what}: got {source.name!r}, an adapter that does not name its model; expected a model; pass the model, "
            f"and adapter={source.name!r}"
        )
    return str(base)
