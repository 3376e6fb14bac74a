"""Tokenizers beside models: lists, messages about those that cannot be read, and numbers of ids."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from oracles import models
from oracles.toy_tokenizer import byte_tokenizer

from specdec_fast import load
from specdec_fast.loading import load_tokenizer
from specdec_fast.targets.tiny_models import tiny_model

TOKENIZER = byte_tokenizer()
VOCAB = len(TOKENIZER)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and its tokenizer."""
    place = tmp_path_factory.mktemp("target")
    tiny_model("llama", vocab_size=VOCAB + 6).save_pretrained(place)
    TOKENIZER.save_pretrained(place)
    return place


def test_a_tokenizer_that_cannot_be_read_is_not_taken_for_none(folder: Path, tmp_path: Path) -> None:
    whole = (folder / "tokenizer.json").read_text()
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    (tmp_path / "tokenizer.json").write_text(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"tokenizer: got .*cannot be read.*; expected .*or remove them and pass"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    assert load_tokenizer(tmp_path) is None, "nor is an empty one made"
    for kind in ("LlamaTokenizer", "Qwen2Tokenizer"):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind, "add_bos_token": True}))
        assert load_tokenizer(tmp_path) is None, "of its settings alone"


def test_a_hub_id_that_is_out_of_reach_has_no_tokenizer() -> None:
    assert load_tokenizer("no/such-model") is None


def test_a_tokenizer_that_lacks_a_package_is_not_taken_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoTokenizer

    def lacks(source: object, **_: object) -> None:
        raise ImportError("this tokenizer needs sentencepiece")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lacks)
    with pytest.raises(ValueError, match=r"tokenizer: got 'some/model', .*ImportError: this tokenizer needs"):
        load_tokenizer("some/model")


def test_a_tokenizer_on_the_hub_that_cannot_be_made_is_not_taken_for_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import huggingface_hub
    from transformers import AutoTokenizer

    def refuses(source: object, **_: object) -> None:
        raise ValueError("contains custom code")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", refuses)
    assert load_tokenizer("some/model") is None
    assert load_tokenizer("some/my--model") is None, "no name on the hub"
    for has in ("tokenizer_config.json", "tekken.json"):
        found = {has: str(tmp_path / has)}
        monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda _, name, found=found: found.get(name))
        with pytest.raises(ValueError, match=r"tokenizer: got 'some/model', .*ValueError: contains custom code"):
            load_tokenizer("some/model")


def test_a_tokenizer_that_was_named_must_be_there(folder: Path) -> None:
    expected = "which has none; expected a folder, GGUF file or hub id that has one"
    with pytest.raises(ValueError, match=f"tokenizer: got 'no/such-model', {expected}"):
        load(folder, tokenizer="no/such-model", max_length=64)
    with pytest.raises(
        ValueError, match=r"tokenizer: got '/no/such/folder', which does not exist; expected .*, or a hub id"
    ):
        load(folder, tokenizer="/no/such/folder", max_length=64)


class Gaps:
    """A tokenizer with unused ids."""

    eos_token_id = None

    def __init__(self, largest: int) -> None:
        self.vocab = {"a": 0, "b": 1, "z": largest}

    def __len__(self) -> int:
        return len(self.vocab)

    def get_vocab(self) -> dict[str, int]:
        return self.vocab


@pytest.mark.parametrize(("largest", "size"), [(40, 41), (10_000, 96)])
def test_ids_with_gaps_are_all_there(largest: int, size: int) -> None:
    assert load(models.own("llama"), tokenizer=Gaps(largest), max_length=64).target.vocab_size == size


def test_a_tokenizer_that_does_not_list_its_tokens_is_as_large_as_it_says() -> None:
    """An object of one's own that encodes and decodes is enough."""

    class Letters:
        eos_token_id = None

        def __len__(self) -> int:
            return 40

    assert load(models.own("llama"), tokenizer=Letters(), max_length=64).target.vocab_size == 40


def test_a_tokenizer_of_another_kind_is_refused() -> None:
    class Processor:
        tokenizer = byte_tokenizer()

    for given, words in (
        (Processor(), "got Processor; .*; pass its attribute tokenizer"),
        (5, "got int; .*; load one with AutoTokenizer"),
        (byte_tokenizer().backend_tokenizer, r"got Tokenizer; .*; pass PreTrainedTokenizerFast\(tokenizer_object="),
    ):
        with pytest.raises(ValueError, match=f"tokenizer: {words}"):
            load(tiny_model("llama"), tokenizer=given)
