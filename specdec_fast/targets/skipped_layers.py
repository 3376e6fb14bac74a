"""The sub-blocks of a model that a draft skips, and the files that store such choices by model id.

Tests: tests/targets/test_skipped_layers.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMAT = "specdec-layers-1"
OWN_FIELDS = ("format", "num_layers", "attention", "mlp")
"""Fields of a file that `write_layers` sets by itself."""


@dataclass(frozen=True, slots=True)
class SkippedLayers:
    """Skipped attention and MLP sub-blocks.

    Attributes:
        attention: Layers whose attention is skipped, sorted.
        mlp: Layers whose MLP is skipped, sorted.
    """

    attention: tuple[int, ...] = ()
    mlp: tuple[int, ...] = ()

    @staticmethod
    def of(attention: Iterable[int] = (), mlp: Iterable[int] = ()) -> SkippedLayers:
        """Builds a choice from layer numbers in any order. Raises ValueError for other values."""
        sets = []
        for kind, numbers in (("attention", attention), ("mlp", mlp)):
            entries = list(numbers) if isinstance(numbers, Iterable) and not isinstance(numbers, str) else [numbers]
            bad = [each for each in entries if not isinstance(each, int) or isinstance(each, bool) or each < 0]
            if bad:
                raise ValueError(f"layers to skip, {kind}: got {bad[0]!r}; expected layer numbers, such as [2, 3]")
            sets.append(tuple(sorted(set(entries))))
        return SkippedLayers(*sets)

    @staticmethod
    def after(layers: int, num_layers: int) -> SkippedLayers:
        """Builds early exit: skips everything behind the first `layers` layers. Raises ValueError if out of range."""
        if not isinstance(layers, int) or isinstance(layers, bool) or not 0 <= layers < num_layers:
            raise ValueError(
                f"exit_after: got {layers!r}; expected 0..{num_layers - 1}: the model has {num_layers} layers"
            )
        rest = tuple(range(layers, num_layers))
        return SkippedLayers(rest, rest)

    @staticmethod
    def middle(num_layers: int) -> SkippedLayers:
        """Builds the default: skips the middle half of the layers."""
        rest = tuple(range(-(-num_layers // 4), num_layers - num_layers // 4))
        return SkippedLayers(rest, rest)

    @staticmethod
    def of_bits(bits: Iterable[bool | int]) -> SkippedLayers:
        """Builds a choice from 2L bits, attention first. 1 is skipped."""
        flags = [bool(bit) for bit in bits]
        half = len(flags) // 2
        return SkippedLayers.of((at for at in range(half) if flags[at]), (at for at in range(half) if flags[half + at]))

    def bits(self, num_layers: int) -> tuple[int, ...]:
        """Returns 2L bits, attention first. 1 is skipped."""
        return tuple(int(at in kind) for kind in (self.attention, self.mlp) for at in range(num_layers))

    def __len__(self) -> int:
        return len(self.attention) + len(self.mlp)

    def check(self, num_layers: int, where: str = "layers to skip") -> SkippedLayers:
        """Returns the choice itself. Raises ValueError if it names a layer that the model does not have."""
        for kind, numbers in (("attention", self.attention), ("mlp", self.mlp)):
            beyond = [each for each in numbers if each >= num_layers]
            if beyond:
                raise ValueError(
                    f"{where}: got {kind} of layer {beyond[0]}; expected 0..{num_layers - 1}: the model has "
                    f"{num_layers} layers"
                )
        return self


def data_folder() -> Path:
    """Returns the folder of stored choices: the variable SPECDEC_DATA, else the user's data folder."""
    chosen = os.environ.get("SPECDEC_DATA")
    if chosen:
        return Path(chosen)
    home = os.environ.get("XDG_DATA_HOME")
    return (Path(home) if home else Path.home() / ".local" / "share") / "specdec-fast"


def choice_path(model_id: str) -> Path:
    """Returns the file of a model's choice. Folders of one name differ by a part of a hash."""
    name = re.sub(r"[^\w.-]+", "--", model_id)
    folder = Path(model_id)
    if folder.is_dir():
        name = f"{folder.resolve().name}-{hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:8]}"
    return data_folder() / "layers" / f"{name}.json"


def write_layers(path: Path, chosen: SkippedLayers, num_layers: int, facts: Mapping[str, Any]) -> None:
    """Writes a choice. The old file stays until the new one is complete.

    Args:
        path: The file.
        chosen: The choice.
        num_layers: Layers of the model.
        facts: Further fields: how the choice was made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "format": FORMAT,
        "num_layers": num_layers,
        "attention": list(chosen.attention),
        "mlp": list(chosen.mlp),
        **facts,
    }
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(path)


def read_layers(path: str | Path) -> dict[str, Any]:
    """Returns the content of a file of `write_layers`. Raises ValueError if it is missing or another file."""
    place = Path(path)
    remedy = "make one with `specdec tune layers`"
    if not place.is_file():
        raise ValueError(f"layers: got {str(path)!r}, which is no file; {remedy}")
    try:
        found = json.loads(place.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"layers: {place} is not JSON ({error}); {remedy}") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT or not isinstance(found.get("num_layers"), int):
        raise ValueError(f"layers: {place} is not of format {FORMAT!r}; {remedy}")
    SkippedLayers.of(found.get("attention", ()), found.get("mlp", ()))
    return found


def read_choice(path: str | Path, num_layers: int) -> SkippedLayers:
    """Returns the choice in a file, for a model of `num_layers` layers. Raises ValueError."""
    found = read_layers(path)
    if found["num_layers"] != num_layers:
        raise ValueError(
            f"layers: {path} is for a model of {found['num_layers']} layers; expected {num_layers}; tune for this model"
        )
    return SkippedLayers.of(found.get("attention", ()), found.get("mlp", ())).check(num_layers, f"layers: {path}")
