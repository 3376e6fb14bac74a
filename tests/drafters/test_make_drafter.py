"""Drafters built by name: messages begin with the drafter's name and end with a remedy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from oracles.automaton import AutomatonTarget, random_logits

from specdec_fast.drafters import make_drafter
from specdec_fast.retrieval.datastore import build
from specdec_fast.retrieval.text_memory import TextMemory
from specdec_fast.retrieval.tokenizer_fingerprint import fingerprint

VOCAB = 8


class Letters:
    """A tokenizer that has a vocabulary only."""

    def __init__(self, shift: int = 0) -> None:
        self.shift = shift

    def get_vocab(self) -> dict[str, int]:
        return {chr(97 + at): (at + self.shift) % VOCAB for at in range(VOCAB)}


OURS, THEIRS = fingerprint(Letters()), fingerprint(Letters(1))


def refused(name: str, **options: Any) -> str:
    """Returns the message for bad options."""
    with pytest.raises(ValueError) as error:
        make_drafter(name, options, target=AutomatonTarget(random_logits(5, VOCAB)), tokenizer=Letters())
    return str(error.value)


def store(folder: Path, vocabulary: str = OURS, vocab_size: int = VOCAB) -> Path:
    build(folder / "store", [[1, 2, 3, 4]], vocab_size, vocabulary)
    return folder / "store"


def texts(folder: Path, vocabulary: str = OURS) -> Path:
    memory = TextMemory(100)
    memory.add([1, 2, 3])
    memory.save(folder / "texts", vocabulary)
    return folder / "texts"


def cut(place: Path) -> Path:
    place.write_bytes(place.read_bytes()[:-64])
    return place


def spoilt(place: Path) -> Path:
    """Changes a letter of the header."""
    place.write_bytes(place.read_bytes().replace(b"vocabulary", b"vocabulari"))
    return place


ABSENT = "expected a file that may be read; make one with `specdec datastore build`"
FOREIGN = (
    "{place}: its tokens are those of another tokenizer (fingerprint {theirs}; expected the target's, {ours}); make it "
    "again with the target's tokenizer"
)
SHORT = "{place}: got {size} bytes; expected at least {whole} for its {last}; it was cut off; make it again"
SPOILT = "{place}: the header's checksum is wrong; the file is damaged; make it again"
WIDE = "{place}: its tokens go up to 29; expected ids below 8; make it again with the target's tokenizer"


@pytest.mark.parametrize(
    ("name", "option", "make", "said"),
    [
        (
            "rest",
            "datastore",
            lambda folder: folder / "gone",
            "datastore: got '{place}': No such file or directory; " + ABSENT,
        ),
        ("rest", "datastore", lambda folder: folder, "datastore: got '{place}': Is a directory; " + ABSENT),
        ("rest", "datastore", texts, "{place}: got a suffix file; expected a datastore file"),
        ("rest", "datastore", lambda folder: cut(store(folder)), SHORT),
        ("rest", "datastore", lambda folder: spoilt(store(folder)), SPOILT),
        ("rest", "datastore", lambda folder: store(folder, THEIRS), FOREIGN),
        ("rest", "datastore", lambda folder: store(folder, "", 30), WIDE),
        (
            "suffix",
            "store",
            lambda folder: folder,
            "got '{place}': Is a directory; expected a readable file",
        ),
        (
            "suffix",
            "store",
            lambda folder: folder / "gone" / "x",
            "store: got '{place}'; expected a file in a folder that exists",
        ),
        ("suffix", "store", lambda folder: cut(texts(folder)), SHORT),
        ("suffix", "store", lambda folder: texts(folder, THEIRS), FOREIGN),
        (
            "layer_skip",
            "layers",
            lambda folder: folder / "gone",
            "layers: got '{place}', which is no file; make one with `specdec tune layers`",
        ),
    ],
)
def test_files_that_cannot_serve(
    name: str, option: str, make: Callable[[Path], Path], said: str, tmp_path: Path
) -> None:
    place = make(tmp_path)
    size = place.stat().st_size if place.exists() else 0
    last = "suffixes" if name == "rest" else "tokens"
    facts = {"theirs": THEIRS[:8], "ours": OURS[:8], "size": size, "whole": size + 64, "last": last}
    assert refused(name, **{option: str(place)}) == f"drafter {name}: " + said.format(place=place, **facts)


def test_a_file_of_layers_that_is_something_else(tmp_path: Path) -> None:
    found = refused("layer_skip", layers=str(store(tmp_path)))
    assert found.startswith(f"drafter layer_skip: layers: {tmp_path / 'store'} is not JSON (")
    assert found.endswith("); make one with `specdec tune layers`")


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("layer_skip", {"exit_after": 4}, "exit_after: got 4; expected 0..3: the model has 4 layers"),
        ("layer_skip", {"exit_after": 1, "layers": "x"}, "got exit_after and layers; expected one of them"),
        ("rest", {}, "got no datastore; expected datastore=PATH, or several; make one with `specdec datastore build`"),
        ("ngram", {"n_max": 0}, "n_min, n_max: got 2, 0; expected 1 <= n_min <= n_max"),
        ("ngram", {"wish": 0}, "got option 'wish'; expected one of num_draft_tokens, n_max, n_min, match"),
        ("ngram", {"num_draft_tokens": 2.5}, "num_draft_tokens: got 2.5; expected a whole number"),
        ("ngram", {"n_max": "four"}, "n_max: got 'four'; expected a whole number"),
        ("suffix", {"shared": "no"}, "shared: got 'no'; expected true or false"),
        ("lookahead", {"window": 0}, "window: got 0; expected a whole number of at least 1"),
        ("lookahead", {"ngram": 1}, "ngram: got 1; expected a whole number of at least 2"),
        ("lookahead", {"guesses": -1}, "guesses: got -1; expected a whole number of at least 0"),
        ("lookahead", {"window": True}, "window: got True; expected a whole number"),
        ("lookahead", {"num_draft_tokens": 7.0}, "num_draft_tokens: got 7.0; expected a whole number, or none"),
        ("jacobi", {"fill": VOCAB}, "fill: got token id 8; expected 0..7"),
        ("draft_tree", {}, "got no draft model; expected draft=, a model of the target's family"),
    ],
)
def test_bad_option_values(name: str, options: dict[str, Any], said: str) -> None:
    assert refused(name, **options) == f"drafter {name}: {said}"


def test_errors_of_a_drafter_in_a_forest_name_that_drafter() -> None:
    assert refused("forest", of={"ngram": {"n_max": 0}, "recycling": {}}).startswith("drafter ngram: n_min, n_max: got")
    assert refused("forest", of="ngram,forest").startswith("drafter forest: of: got a forest; expected")
