"""EAGLE checkpoints that are broken or of another kind: errors name every key and field."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import heads, models

from specdec_fast.heads.checkpoint_eagle import load_eagle, load_eagle3

PLAIN = {key: value for key, value in heads.LAYER.items() if key not in ("head_dim", "num_hidden_layers")}
REDUCED = {**heads.LAYER, "draft_vocab_size": len(heads.KEPT)}
IDS = [1, 0, 1]


@pytest.fixture(scope="module")
def target() -> Any:
    return models.target("llama", max_rows=2)


def _without(key: str) -> Any:
    return lambda config, tensors: tensors.pop(key)


class Trap:
    """Makes a folder when it is unpickled."""

    def __init__(self, place: Path) -> None:
        self.place = str(place)

    def __reduce__(self) -> Any:
        return (os.mkdir, (self.place,))


BROKEN = [
    (_without("midlayer.mlp.up_proj.weight"), "missing: layers.0.mlp.up_proj.weight"),
    (_without("d2t"), "missing: d2t"),
    (_without("midlayer.hidden_norm.weight"), "got no hidden_norm.weight in its first layer"),
    (lambda config, tensors: tensors.update(surplus=torch.zeros(1)), "nothing reads: surplus"),
    (
        lambda config, tensors: tensors.update({"fc.weight": torch.zeros(64, 128)}),
        r"got layers \[1, 0, 1\], but the head reads 2 hidden states \(fc.weight has 128 columns\)",
    ),
    (
        lambda config, tensors: tensors.update({"norm.weight": torch.zeros(63)}),
        r"norm.weight is \[63\], expected \[64\]; is this a head for this target",
    ),
    (
        lambda config, tensors: tensors.update({"fc.weight": torch.zeros(64, 100)}),
        "width that fc.weight reads is 100, the target's is 64; use a head that was trained for this target",
    ),
    (lambda config, tensors: config.update(hidden_size=32), "hidden_size is 32, the target's is 64"),
    (lambda config, tensors: config.update(vocab_size=500), "vocab_size is 500, the target's is 96"),
    (lambda config, tensors: config.update(draft_vocab_size=7), "'draft_vocab_size' is 7, lm_head.weight has 64 rows"),
    (lambda config, tensors: config.update(num_hidden_layers=2), "'num_hidden_layers' is 2, the file has 1"),
    (lambda config, tensors: config.update(model_type="gpt2"), "model_type: got 'gpt2'"),
    (
        lambda config, tensors: config.update(num_attention_heads=3),
        r"config.json: got layers that cannot be read \(.* is not a multiple of the number of attention heads \(3\)",
    ),
    (
        lambda config, tensors: config.update(eagle_aux_hidden_state_layer_ids=[0, 1, 3]),
        r"inputs of layers \[0, 1, 3\]; expected numbers from 0 to 2",
    ),
    (lambda config, tensors: tensors["d2t"].neg_(), "d2t leads to ids"),
    (lambda config, tensors: tensors["t2d"].logical_not_(), "t2d and d2t name different ids"),
    (lambda config, tensors: config.update(speculators_model_type="dflash"), "'speculators_model_type' is 'dflash'"),
    (lambda config, tensors: config.update(vocab_size="many"), "'vocab_size' is 'many'; expected int"),
    (lambda config, tensors: config.update(hidden_size=[64]), r"'hidden_size' is \[64\]; expected int"),
    (
        lambda config, tensors: config.update(speculators_config={"proposal_methods": ["greedy"]}),
        "has 'greedy'; expected",
    ),
    (
        lambda config, tensors: config.update(speculators_config={"proposal_methods": [{"accept_tolerance": "much"}]}),
        "'accept_tolerance' is 'much'; expected int or float",
    ),
    (
        lambda config, tensors: config.update(
            eagle_aux_hidden_state_layer_ids=None, eagle_config={"eagle_aux_hidden_state_layer_ids": [[1], 2, 3]}
        ),
        r"inputs of layers \[\[1\], 2, 3\]",
    ),
]


@pytest.mark.parametrize(("change", "message"), BROKEN)
def test_errors_name_the_key_or_field(tmp_path: Path, target: Any, change: Any, message: str) -> None:
    config, tensors = {**REDUCED, "eagle_aux_hidden_state_layer_ids": IDS}, heads.eagle3_tensors()
    change(config, tensors)
    with pytest.raises(ValueError, match=message):
        load_eagle3(heads.write(tmp_path, config, tensors), target)


@pytest.mark.parametrize("load", [load_eagle, load_eagle3])
def test_pickled_code_in_a_bin_is_not_run(tmp_path: Path, target: Any, load: Any) -> None:
    tensors: Any = {"fc.weight": Trap(tmp_path / "sprung")}
    folder = heads.write(tmp_path, dict(heads.LAYER), tensors, "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin: it holds pickled code .*not run; expected tensors only"):
        load(folder, target)
    assert not (tmp_path / "sprung").exists()


def test_each_drafter_names_the_other(tmp_path: Path, target: Any) -> None:
    with pytest.raises(ValueError, match=r"got an EAGLE-3 head; .* use drafter eagle3"):
        load_eagle(heads.write(tmp_path / "3", REDUCED, heads.eagle3_tensors()), target)
    with pytest.raises(ValueError, match=r"got no hidden_norm\.weight .*; take drafter eagle for heads of EAGLE-1"):
        load_eagle3(heads.write(tmp_path / "1", PLAIN, heads.eagle_tensors()), target)
