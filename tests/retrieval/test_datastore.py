"""Datastores: suffix arrays of both builders, contents of files, and files that do not fit."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np
import pytest

from specdec_fast.retrieval import file_format
from specdec_fast.retrieval.datastore import Datastore, build, suffix_array
from specdec_fast.retrieval.suffix_index import structures

BUILDERS = ["pydivsufsort", "numpy"]


@pytest.fixture(params=BUILDERS)
def builder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "numpy":
        monkeypatch.setitem(sys.modules, "pydivsufsort", None)
    else:
        pytest.importorskip("pydivsufsort")
    return str(request.param)


@pytest.mark.parametrize("seed", range(5))
def test_the_suffix_array(builder: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec_fast.retrieval.datastore._PIECE", 50 + seed)
    source = random.Random(seed)
    for dtype, most in ((np.uint16, 2), (np.uint16, 60_000), (np.uint32, 100_000)):
        stream = [source.randrange(most) for _ in range(source.randrange(1, 200))] + [source.randrange(most)] * seed
        found = suffix_array(np.array(stream, dtype))
        assert found.dtype == np.uint32
        assert found.tolist() == sorted(range(len(stream)), key=lambda at: stream[at:])


def test_look_ups_in_a_file(builder: str, tmp_path: Path) -> None:
    stages: list[tuple[str, int]] = []
    documents = [[1, 2, 3], [], [1, 2, 4], [4, 1]]
    build(tmp_path / "store", documents, 5, "abc", lambda stage, tokens: stages.append((stage, tokens)))
    store = Datastore(tmp_path / "store", "abc", 5)
    assert (store.num_documents, store.num_tokens, store.vocab_size) == (3, 8, 5)
    assert stages == [("reading", 4), ("reading", 8), ("reading", 11), ("sorting", 11), ("writing", 11)]
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    store.verify()
    grown = structures().look_up([store.array], [9, 1, 2], 16, 4, 100, 8, 2, 0.0)
    assert grown == ([3, 4], [0, 0], 1.0, 2), "nothing behind the separators"
    assert structures().look_up([store.array], [4, 1], 16, 4, 100, 8, 2, 0.0) == ([], [], 0.0, 2)


def test_tokens_take_as_many_bytes_as_the_vocabulary_needs(tmp_path: Path) -> None:
    for vocab_size, width in ((2**16 - 1, 2), (2**16, 4), (150_000, 4)):
        build(tmp_path / "store", [[0, vocab_size - 1, vocab_size - 1]], vocab_size)
        _, arrays = file_format.read(tmp_path / "store", "datastore")
        assert arrays["tokens"].itemsize == width
        assert arrays["tokens"].tolist() == [0, vocab_size - 1, vocab_size - 1, vocab_size], "nothing is cut to 16 bits"
        found = structures().look_up([Datastore(tmp_path / "store").array], [0, vocab_size - 1], 16, 4, 9, 9, 1, 0.0)
        assert found[0] == [vocab_size - 1]


def test_a_failed_build_leaves_no_file(tmp_path: Path) -> None:
    for documents, vocab_size, message in (
        ([[1, 2], [7]], 7, "document 1: got token 7; expected 0 to 6"),
        ([[-1]], 7, "document 0: got token -1"),
        ([[], []], 7, "got no tokens; expected at least one document with text"),
        ([[1]], 0, "got vocab_size 0; expected 1 to"),
    ):
        with pytest.raises(ValueError, match=f"datastore: {message}"):
            build(tmp_path / "store", documents, vocab_size)
    with pytest.raises(ValueError, match="expected a file in a folder that exists"):
        build(tmp_path / "gone" / "store", [[1]], 7)
    assert list(tmp_path.iterdir()) == []


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    place = tmp_path / "store"
    build(place, [[1, 2, 3] * 50], 5, "abc")
    with pytest.raises(ValueError, match="its tokens are those of another tokenizer"):
        Datastore(place, "xyz")
    with pytest.raises(ValueError, match="its tokens go up to 4; expected ids below 4"):
        Datastore(place, "abc", 4)
    whole = place.read_bytes()
    place.write_bytes(whole[:-100])
    with pytest.raises(ValueError, match="it was cut off; make it again"):
        Datastore(place)
    place.write_bytes(whole[:-65] + b"\x7f" + whole[-64:])
    with pytest.raises(ValueError, match="the checksum of its suffixes is wrong"):
        Datastore(place).verify()
    file_format.write(place, "datastore", {"vocabulary": "", "vocab_size": 5}, {
        "tokens": np.zeros(3, np.uint16), "suffixes": np.zeros(2, np.uint32)
    })  # fmt: skip
    with pytest.raises(ValueError, match="got 2 suffixes of 3 tokens; make it again"):
        Datastore(place)


@pytest.mark.parametrize("damage", ["none", "lost", "noise", "beyond", "swapped", "tokens", "too large"])
def test_opening_checks_a_sample(damage: str, tmp_path: Path) -> None:
    """A twentieth of the suffixes, or all tokens, are damaged. The check does not read the file in full."""
    source = np.random.default_rng(5)
    text = source.integers(0, 300, 20_000, np.uint16)
    build(tmp_path / "store", [text.tolist()], 300)
    _, arrays = file_format.read(tmp_path / "store", "datastore")
    whole = bytearray((tmp_path / "store").read_bytes())
    tokens, suffixes = (np.array(arrays[name]) for name in ("tokens", "suffixes"))
    starts = {name: whole.index(array.tobytes()) for name, array in arrays.items()}
    part = slice(7000, 8000)
    if damage == "lost":
        suffixes[part] = 0
    elif damage == "noise":
        suffixes[part] = source.permutation(suffixes[part])
    elif damage == "beyond":
        suffixes[part] += 20_001
    elif damage == "swapped":
        suffixes = suffixes[::-1].copy()
    elif damage == "tokens":
        tokens = source.permutation(tokens)
    elif damage == "too large":
        tokens[tokens == 299] = 301  # one above the separator, and in order
    for name, array in (("tokens", tokens), ("suffixes", suffixes)):
        whole[starts[name] : starts[name] + array.nbytes] = array.tobytes()
    (tmp_path / "store").write_bytes(whole)
    if damage == "none":
        Datastore(tmp_path / "store").verify()
        return
    with pytest.raises(ValueError, match=r"its suffixes are not in order at rank \d+; it is damaged; make it again"):
        Datastore(tmp_path / "store")


def test_every_valid_datastore_is_opened(tmp_path: Path) -> None:
    """Datastores of one token, with runs longer than the comparison, equal documents, and as many tokens as are
    checked.
    """
    for documents in ([[0]], [[3] * 500], [[1, 2]] * 40, [[1, 2, 1]], [list(range(4)) * 16, [0] * 70]):
        build(tmp_path / "store", documents, 4)
        Datastore(tmp_path / "store").verify()
