"""The choice of skipped layers: values and files."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdec_fast.targets.skipped_layers import SkippedLayers, choice_path, read_choice, read_layers, write_layers


def test_accepted_values() -> None:
    assert SkippedLayers.of([3, 1, 1], (2,)) == SkippedLayers((1, 3), (2,)) and len(SkippedLayers((1, 3), (2,))) == 3
    assert SkippedLayers.after(2, 4) == SkippedLayers((2, 3), (2, 3)) and SkippedLayers.after(0, 1) == SkippedLayers(
        (0,), (0,)
    )
    sizes = {layers: SkippedLayers.middle(layers).mlp for layers in (1, 2, 3, 4, 12)}
    assert sizes == {1: (), 2: (1,), 3: (1, 2), 4: (1, 2), 12: (3, 4, 5, 6, 7, 8)}
    bits = (0, 1, 0, 1, 1, 0)
    assert SkippedLayers.of_bits(bits) == SkippedLayers((1,), (0, 1)) and SkippedLayers((1,), (0, 1)).bits(3) == bits


def test_a_written_file_is_read_back(tmp_path: Path) -> None:
    place = tmp_path / "deep" / "x.json"
    write_layers(place, SkippedLayers((1,), (0, 2)), 4, {"model": "someone/model"})
    assert read_choice(place, 4) == SkippedLayers((1,), (0, 2)) and read_layers(place)["model"] == "someone/model"
    assert [path.name for path in place.parent.iterdir()] == ["x.json"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "is not of format 'specdec-layers-1'"),
        ('{"format": "specdec-layers-0"}', "is not of format"),
        ('{"format": "specdec-layers-1", "num_layers": 4, "attention": ["a"]}', "attention: got 'a'"),
        ('{"format": "specdec-layers-1", "num_layers": 8}', "is for a model of 8 layers; expected 4"),
        ('{"format": "specdec-layers-1", "num_layers": 4, "mlp": [4]}', "got mlp of layer 4; expected 0..3"),
    ],
)
def test_invalid_files(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        read_choice(tmp_path / "x.json", 4)


def test_every_model_has_its_own_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_DATA", str(tmp_path))
    (tmp_path / "a" / "model").mkdir(parents=True)
    (tmp_path / "b" / "model").mkdir(parents=True)
    ids = ["someone/model", "model", str(tmp_path / "a" / "model"), str(tmp_path / "b" / "model")]
    places = [choice_path(each) for each in ids]
    assert len(set(places)) == 4 and {place.parent for place in places} == {tmp_path / "layers"}
    assert places[0].name == "someone--model.json" and places[2].name.startswith("model-")
    monkeypatch.delenv("SPECDEC_DATA")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "x"))
    assert choice_path("m") == tmp_path / "x" / "specdec-fast" / "layers" / "m.json"
