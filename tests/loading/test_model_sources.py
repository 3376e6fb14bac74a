"""Names of models: what each stands for, without loading anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdec_fast.loading import is_hub_id
from specdec_fast.loading.model_sources import BUNDLED, resolve_source


@pytest.mark.parametrize(
    ("name", "place", "file"),
    [
        ("owner/name", "owner/name", None),
        ("gpt2", "gpt2", None),
        ("owner/name:x.gguf", "owner/name", "x.gguf"),
        ("owner/name:Q4/x-Q4_K_M.GGUF", "owner/name", "Q4/x-Q4_K_M.GGUF"),
    ],
)
def test_names_on_the_hub(name: str, place: str, file: str | None) -> None:
    found = resolve_source(name)
    assert (found.place, found.gguf_file, found.is_local, found.is_bundled) == (place, file, False, False)
    assert is_hub_id(name)


def test_bundled_names() -> None:
    found = resolve_source("demo-target")
    assert found.place == BUNDLED["demo-target"] and found.is_bundled and found.is_local and not found.is_adapter


def test_folders_go_before_names_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert resolve_source("owner/name").is_local and not is_hub_id("owner/name")
    (tmp_path / "owner" / "name" / "adapter_config.json").touch()
    assert resolve_source("owner/name").is_adapter
    (tmp_path / "owner" / "name" / "config.json").touch()
    assert not resolve_source("owner/name").is_adapter, "a model with an adapter in its folder"


@pytest.mark.parametrize("name", ["demo-medusa", "demo-targt", "/no/such", "a b", "x.gguf", "a/b:c"])
def test_names_of_nothing_are_no_names_on_the_hub(name: str) -> None:
    assert not is_hub_id(name)
    with pytest.raises(ValueError, match=r"^draft: got"):
        resolve_source(name, "draft")


@pytest.mark.parametrize(
    ("source", "asked"),
    [("somebody/model", True), ("gpt2", True), ("demo-target", False), ("demo-targt", False), ("/no/such", False)],
)
def test_hub_ids_are_recognised(source: str, asked: bool, tmp_path: Path) -> None:
    assert is_hub_id(source) == asked and not is_hub_id(tmp_path)
