"""Heads that cannot serve a target: errors name drafter, file, fault and expected value, for every kind."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import heads, models
from safetensors.torch import load_file, save_file

from specdec_fast.drafters import make_drafter
from specdec_fast.heads.blockwise import BlockwiseHeads
from specdec_fast.heads.checkpoint_blockwise import save_blockwise
from specdec_fast.heads.checkpoint_medusa import save_medusa
from specdec_fast.heads.medusa import MedusaHeads

NAMES = ("medusa", "blockwise", "eagle", "eagle3", "mtp")


@pytest.fixture(scope="module")
def target() -> Any:
    return models.target("llama", max_rows=1, max_length=64)


def sound(name: str, folder: Path, hidden: int = heads.HIDDEN, vocab: int = heads.VOCAB) -> Path:
    """Writes a valid head for the tiny target, and returns its folder."""
    if name == "medusa":
        save_medusa(MedusaHeads(hidden, vocab, 5), folder, base_model="x")
    elif name == "blockwise":
        save_blockwise(BlockwiseHeads(hidden, vocab, 3), folder, base_model="x")
    else:
        folder = Path(heads.options(name, folder)["head"])
        change_config(folder, **({"eagle_aux_hidden_state_layer_ids": [0, 1, 1]} if name == "eagle3" else {}))
    return folder


def change_config(folder: Path, **fields: Any) -> None:
    """Changes fields of config.json."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


def refused(name: str, head: Path | str, target: Any, message: str) -> None:
    words = rf"^drafter {name}: .*{re.escape(str(head))}.*{message}"
    with pytest.raises(ValueError, match=words):
        make_drafter(name, {"head": str(head)}, target=target)


@pytest.mark.parametrize("name", NAMES)
def test_a_valid_head_is_opened(name: str, target: Any, tmp_path: Path) -> None:
    make_drafter(name, {"head": str(sound(name, tmp_path))}, target=target)


WIDTH = {
    "medusa": "hidden size is 32, the target's is 64; take heads that were trained for this target",
    "blockwise": "hidden_size is 32, the target's is 64; take heads that were trained for this target",
    "eagle": "hidden_size is 32, the target's is 64; use a head that was trained for this target",
    "eagle3": "hidden_size is 32, the target's is 64; use a head that was trained for this target",
    "mtp": "hidden_size in config.json is 32, the target's is 64; take the checkpoint that the target came from",
}


VOCABULARY = {
    "medusa": r"projection of head 0 is \[90, 64\]; expected \[96, 64\], the target's vocabulary; take heads",
    "blockwise": "vocab_size is 90, the target's is 96; take heads",
    "eagle": "vocab_size is 90, the target's is 96; use a head",
    "eagle3": "vocab_size is 90, the target's is 96; use a head",
    "mtp": "vocab_size in config.json is 90, the target's is 96; take the checkpoint",
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("built", "said", "messages"),
    [({"hidden": 32}, {"hidden_size": 32}, WIDTH), ({"vocab": 90}, {"vocab_size": 90}, VOCABULARY)],
    ids=["width", "vocabulary"],
)
def test_wrong_sizes(
    name: str, built: dict[str, int], said: dict[str, int], messages: dict[str, str], target: Any, tmp_path: Path
) -> None:
    if name in ("medusa", "blockwise"):
        folder = sound(name, tmp_path, **built)
    else:
        change_config(folder := sound(name, tmp_path), **said)
    refused(name, folder, target, messages[name])


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        (
            "medusa",
            {"medusa_num_heads": 2},
            "config.json: medusa_num_heads is 2, but the file holds 5 heads; .*correct",
        ),
        ("medusa", {"medusa_num_layers": 2}, "config.json: medusa_num_layers is 2, but the heads of the file have 1"),
        (
            "blockwise",
            {"num_heads": 2},
            "config.json: field 'num_heads' is 2, but outer.weight in .*; correct the field",
        ),
        ("eagle", {"num_hidden_layers": 2}, "config.json: field 'num_hidden_layers' is 2, the file has 1; .*correct"),
        (
            "eagle3",
            {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]},
            r"inputs of layers \[0, 1, 3\]; expected numbers from 0 to 2 .*; .*or name the layers by option layers=",
        ),
        (
            "eagle3",
            {"eagle_aux_hidden_state_layer_ids": [0, 1]},
            r"got layers \[0, 1\], but the head reads 3 hidden states \(fc.weight has 192 columns\); expected as many",
        ),
        ("mtp", {"num_hidden_layers": 61}, "num_hidden_layers in config.json is 61, the target's is 2; take the"),
    ],
)
def test_wrong_numbers_of_heads_or_layers(
    name: str, fields: dict[str, Any], message: str, target: Any, tmp_path: Path
) -> None:
    change_config(folder := sound(name, tmp_path), **fields)
    refused(name, folder, target, message)


class Trap:
    """Makes a folder when it is unpickled."""

    def __init__(self, place: Path) -> None:
        self.place = str(place)

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (self.place,)


@pytest.mark.parametrize("name", NAMES)
def test_pickled_code_is_not_run(name: str, target: Any, tmp_path: Path) -> None:
    folder = sound(name, tmp_path / "head")
    for file in folder.iterdir():
        if file.name != "config.json":
            file.unlink()
    pickled = folder / ("medusa_lm_head.pt" if name == "medusa" else "pytorch_model.bin")
    torch.save({"trap": Trap(tmp_path / "sprung")}, pickled)
    message = "it holds pickled code or objects, and they are not run; expected tensors only; convert it to safetensors"
    if name == "blockwise":  # the layout of this head has no such file
        refused(name, folder, target, "got config.json, pytorch_model.bin; expected model.safetensors")
    else:
        refused(name, folder, target, rf"{pickled.name}: {message}")
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("name", NAMES)
def test_a_hub_id_without_a_network(name: str, target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    message = "; expected a folder with config.json and .*or a hub id that is reachable from here .to work offline"
    refused(name, "owner/heads", target, message)


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_tensor(name: str, target: Any, tmp_path: Path) -> None:
    folder = sound(name, tmp_path)
    file = next(file for file in folder.iterdir() if file.name != "config.json")
    tensors = torch.load(file) if file.suffix == ".bin" else load_file(file)
    key = sorted(key for key in tensors if "d2t" not in key and "norm" not in key and "embed" not in key)[0]
    del tensors[key]
    torch.save(tensors, file) if file.suffix == ".bin" else save_file(tensors, file)
    refused(name, folder, target, rf"missing: .*{re.escape(key.removeprefix('midlayer.'))}")
