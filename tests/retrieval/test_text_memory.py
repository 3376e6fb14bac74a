"""Texts of finished requests: eviction in order of age, files, and files of other vocabularies."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from specdec_fast.retrieval import file_format
from specdec_fast.retrieval.text_memory import TextMemory
from specdec_fast.retrieval.tokenizer_fingerprint import fingerprint

HOW = {"nodes": 4, "max_match": 8, "min_match": 1, "factor": 2.0, "min_probability": 0.1}


def test_the_oldest_texts_are_evicted() -> None:
    memory = TextMemory(6)
    memory.add([1, 2, 3])
    memory.add([1, 2, 4])
    assert memory.grow([9, 1, 2], **HOW)[0] == [3, 4] and len(memory) == 6
    memory.add([5])
    assert memory.texts == [[1, 2, 4], [5]] and memory.grow([1, 2], **HOW)[0] == [4]
    memory.add([7, 8] * 5)
    assert memory.texts == [[7, 8] * 3], "of a text that is too long its end is kept"
    memory.add([])
    assert memory.texts == [[7, 8] * 3]


def test_a_file_holds_the_same_texts(tmp_path: Path) -> None:
    memory, place = TextMemory(100), tmp_path / "texts"
    for text in ([1, 2, 3], [1, 2, 4, 70_000], [9]):
        memory.add(text)
    memory.save(place, "abc")
    again, small = TextMemory(100), TextMemory(5)
    again.load(place, "abc", 70_001)
    small.load(place)
    assert again.texts == memory.texts and again.grow([1, 2], **HOW) == memory.grow([1, 2], **HOW)
    assert small.texts == [[1, 2, 4, 70_000], [9]], "what does not fit is forgotten, the oldest first"
    TextMemory(3).save(tmp_path / "nothing")
    again.load(tmp_path / "nothing")
    assert again.texts == memory.texts


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    memory, place = TextMemory(100), tmp_path / "texts"
    memory.add([1, 300])
    memory.save(place, "abc")
    with pytest.raises(ValueError, match=r"another tokenizer \(fingerprint abc; expected the target's, xyz\)"):
        TextMemory(9).load(place, "xyz")
    with pytest.raises(ValueError, match="got token 300; expected ids below 300"):
        TextMemory(9).load(place, "abc", 300)
    whole = bytearray(place.read_bytes())
    whole[-64] ^= 1
    place.write_bytes(whole)
    with pytest.raises(ValueError, match="the checksum of its tokens is wrong"):
        TextMemory(9).load(place)
    arrays = {"lengths": np.array([5], np.int64), "tokens": np.array([1], np.uint32)}
    file_format.write(place, "suffix", {"vocabulary": ""}, arrays)
    with pytest.raises(ValueError, match="its lengths do not add up"):
        TextMemory(9).load(place)


def test_sizes_below_one_token_are_refused() -> None:
    for size, depth in ((0, 8), (8, 1)):
        with pytest.raises(ValueError, match="memory of texts: got max_tokens"):
            TextMemory(size, depth)


def test_fingerprints_tell_vocabularies_apart() -> None:
    class Other:
        def get_vocab(self) -> dict[str, int]:
            return {"a": 1, "b": 0}

    class Same:
        def get_vocab(self) -> dict[str, int]:
            return {"b": 1, "a": 0}

    class Again:
        def get_vocab(self) -> dict[str, int]:
            return {"a": 0, "b": 1}

    assert fingerprint(Same()) == fingerprint(Again()) != fingerprint(Other()) and fingerprint(None) == ""
