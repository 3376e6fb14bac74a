"""Which sub-blocks of a model a draft leaves out, and the files that hold such choices beside the model's id.

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


@dataclass(frozen=True, slots=True)
class SkippedLayers:
    """Attention and MLP sub-blocks that are left out, as sorted layer numbers."""

    attention: tuple[int, ...] = ()
    mlp: tuple[int, ...] = ()

    @staticmethod
    def of(attention: Iterable[int] = (), mlp: Iterable[int] = ()) -> SkippedLayers:
        """In any order. Raises ValueError for what is no layer number."""
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
        """Early exit: everything behind the first `layers` layers. Raises ValueError unless 0 <= layers < all."""
        if not isinstance(layers, int) or isinstance(layers, bool) or not 0 <= layers < num_layers:
            raise ValueError(
                f"exit_after: got {layers!r}; expected 0..{num_layers - 1}: the model has {num_layers} layers"
            )
        rest = tuple(range(layers, num_layers))
        return SkippedLayers(rest, rest)

    @staticmethod
    def middle(num_layers: int) -> SkippedLayers:
        """The middle half of the layers, whole: a choice for want of a better one."""
        rest = tuple(range(-(-num_layers // 4), num_layers - num_layers // 4))
        return SkippedLayers(rest, rest)

    @staticmethod
    def of_bits(bits: Iterable[bool | int]) -> SkippedLayers:
        """From 2L bits, attention first: 1 is left out."""
        flags = [bool(bit) for bit in bits]
        half = len(flags) // 2
        return SkippedLayers.of((at for at in range(half) if flags[at]), (at for at in range(half) if flags[half + at]))

    def bits(self, num_layers: int) -> tuple[int, ...]:
        """2L bits, attention first: 1 is left out."""
        return tuple(int(at in kind) for kind in (self.attention, self.mlp) for at in range(num_layers))

    def __len__(self) -> int:
        return len(self.attention) + len(self.mlp)

    def check(self, num_layers: int, where: str = "layers to skip") -> SkippedLayers:
        """Itself. Raises ValueError where it names a layer that the model does not have."""
        for kind, numbers in (("attention", self.attention), ("mlp", self.mlp)):
            beyond = [each for each in numbers if each >= num_layers]
            if beyond:
                raise ValueError(
                    f"{where}: got {kind} of layer {beyond[0]}; expected 0..{num_layers - 1}: the model has "
                    f"{num_layers} layers"
                )
        return self


def data_folder() -> Path:
    """Where choices are kept: the variable SPECDEC_DATA, else the user's data folder."""
    chosen = os.environ.get("SPECDEC_DATA")
    if chosen:
        return Path(chosen)
    home = os.environ.get("XDG_DATA_HOME")
    return (Path(home) if home else Path.home() / ".local" / "share") / "specdec-fast"


def place_of(model_id: str) -> Path:
    """The file for a model's choice. A folder is told apart from others of its name by a part of a hash."""
    name = re.sub(r"[^\w.-]+", "--", model_id)
    folder = Path(model_id)
    if folder.is_dir():
        name = f"{folder.resolve().name}-{hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:8]}"
    return data_folder() / "layers" / f"{name}.json"


def write_layers(path: Path, chosen: SkippedLayers, num_layers: int, facts: Mapping[str, Any]) -> None:
    """Write a choice with whatever else is known of it. The old file stays until the new one is complete."""
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
    """What `write_layers` wrote. Raises ValueError for a file that is missing or something else."""
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


def chosen_in(path: str | Path, num_layers: int) -> SkippedLayers:
    """The choice of a file, for a model of so many layers. Raises ValueError."""
    found = read_layers(path)
    if found["num_layers"] != num_layers:
        raise ValueError(
            f"layers: {path} is for a model of {found['num_layers']} layers; expected {num_layers}; tune for this model"
        )
    return SkippedLayers.of(found.get("attention", ()), found.get("mlp", ())).check(num_layers, f"layers: {path}")
