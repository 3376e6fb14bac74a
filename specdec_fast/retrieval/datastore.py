"""Datastores: a token stream on disk with its suffix array, mapped into memory and searched by suffix (REST).

The stream holds documents, each followed by a separator, the id one above the vocabulary. Tokens take two bytes if the
vocabulary allows it, positions take four below 2**32 tokens. Source: He et al. 2023 (REST), section 3.1.
Tests: tests/retrieval/test_datastore.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np

from specdec_fast.retrieval import file_format
from specdec_fast.retrieval.suffix_index import structures
from specdec_fast.retrieval.tokenizer_fingerprint import refuse_other_vocabulary
from specdec_kernels.dispatch.extras import install_hint

log = logging.getLogger("specdec_fast")

KIND = "datastore"
Report = Callable[[str, int], None]

_PIECE = 1 << 24  # positions that are processed together
_PROBES, _COMPARED = 64, 8  # pairs of neighbours that opening checks, and tokens of each


def suffix_array(tokens: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Sorts the suffixes of a token stream.

    Uses divsufsort if pydivsufsort is installed (extra: datastore). It takes 5 bytes of memory per byte of the stream
    (9 from 2 GiB on), plus the result. Otherwise numpy sorts by doubling, which takes several times the time and
    memory.

    Args:
        tokens: Unsigned tokens [n].

    Returns:
        Positions in the order of the suffixes that start there, uint32 or int64 [n].
    """
    dtype = np.uint32 if len(tokens) < 2**32 else np.int64
    try:
        from pydivsufsort import divsufsort
    except ImportError:
        log.warning("datastore: pydivsufsort is not installed, so numpy sorts; %s", install_hint("datastore"))
        return _suffix_array_by_doubling(np.asarray(tokens)).astype(dtype)
    unit = tokens.dtype.itemsize  # it sorts bytes: big-endian tokens have the same order
    places = divsufsort(tokens.astype(tokens.dtype.newbyteorder(">")).view(np.uint8))
    found, count = np.empty(len(tokens), dtype), 0
    for start in range(0, len(places), _PIECE):
        piece = places[start : start + _PIECE]
        own = piece[piece % unit == 0]
        found[count : count + len(own)] = own // unit
        count += len(own)
    return found


def _suffix_array_by_doubling(tokens: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Suffix array by prefix doubling (Manber and Myers 1990)."""
    size = len(tokens)
    if size == 0:
        return np.zeros(0, np.int64)
    rank = np.unique(tokens, return_inverse=True)[1].astype(np.int64) + 1
    reach = 1
    while True:
        key = rank * np.int64(rank.max() + 1)
        if reach < size:
            key[:-reach] += rank[reach:]
        order = np.argsort(key, kind="stable")
        grown = key[order]
        rank = np.empty(size, np.int64)
        rank[order] = np.cumsum(np.concatenate([[1], grown[1:] != grown[:-1]]))
        if rank[order[-1]] == size or reach >= size:
            return order
        reach *= 2


def build(
    path: str | Path,
    documents: Iterable[Sequence[int]],
    vocab_size: int,
    vocabulary: str = "",
    report: Report = lambda stage, tokens: None,
) -> None:
    """Writes a datastore.

    Args:
        path: The file.
        documents: Token ids of each document.
        vocab_size: All ids are below it.
        vocabulary: Fingerprint of the tokenizer.
        report: Called with the stage ("reading", "sorting", "writing") and the tokens so far.

    Raises:
        ValueError: If an id is out of range, if there are no tokens, or if the folder does not exist.
    """
    place = Path(path)
    if not place.absolute().parent.is_dir():
        raise ValueError(f"datastore: got {str(path)!r}; expected a file in a folder that exists")
    if not 1 <= vocab_size < 2**31:
        raise ValueError(f"datastore: got vocab_size {vocab_size}; expected 1 to 2**31 - 1")
    dtype = np.uint16 if vocab_size < 2**16 else np.uint32  # the separator is vocab_size itself
    count = size = 0
    with TemporaryFile(dir=place.absolute().parent) as file:
        for document in documents:
            tokens = np.asarray(document, dtype=np.int64)
            if len(tokens) == 0:
                continue
            if tokens.min() < 0 or tokens.max() >= vocab_size:
                bad = int(tokens[(tokens < 0) | (tokens >= vocab_size)][0])
                raise ValueError(f"datastore: document {count}: got token {bad}; expected 0 to {vocab_size - 1}")
            file.write(np.append(tokens, vocab_size).astype(dtype).tobytes())
            count, size = count + 1, size + len(tokens) + 1
            report("reading", size)
        if count == 0:
            raise ValueError("datastore: got no tokens; expected at least one document with text")
        file.flush()
        stream = np.memmap(file, dtype, "r", shape=(size,))
        report("sorting", size)
        suffixes = suffix_array(stream)
        report("writing", size)
        header = {"vocabulary": vocabulary, "vocab_size": vocab_size, "documents": count, "tokens": size - count}
        file_format.write(place, KIND, header, {"tokens": stream, "suffixes": suffixes})


def find_disorder(tokens: np.ndarray[Any, Any], suffixes: np.ndarray[Any, Any], vocab_size: int) -> int | None:
    """Checks a sample of a suffix array: pairs of neighbours, evenly spread, by their first tokens.

    It takes less than a millisecond if these pages are in memory.

    Args:
        tokens: The stream [n].
        suffixes: The suffix array [n].
        vocab_size: The separator.

    Returns:
        A rank at which the array is wrong, or None.
    """
    size = len(tokens)
    ranks = np.unique(np.linspace(0, size - 2, _PROBES).astype(np.int64))
    places = np.stack([suffixes[ranks], suffixes[ranks + 1]]).astype(np.int64)
    inside = ((places >= 0) & (places < size)).all(0)
    at = np.where(inside, places, 0)[:, :, None] + np.arange(_COMPARED)
    found = np.where(at < size, tokens[np.minimum(at, size - 1)].astype(np.int64), -1)  # a shorter suffix sorts first
    first = (found[0] != found[1]).argmax(1)  # 0 where all are equal
    low, high = (np.take_along_axis(own, first[:, None], 1)[:, 0] for own in found)
    wrong = ~inside | (places[0] == places[1]) | (low > high) | (found > vocab_size).any((0, 2))
    return int(ranks[wrong.argmax()]) if wrong.any() else None


class Datastore:
    """An open datastore. Opening checks a sample of it, `verify` checks everything.

    Args:
        path: The file.
        vocabulary: Expected fingerprint of the tokenizer. "": any.
        vocab_size: Expected vocabulary of the target. None: any.

    Raises:
        ValueError: If the file is no datastore, is truncated or damaged, or belongs to another tokenizer.
    """

    def __init__(self, path: str | Path, vocabulary: str = "", vocab_size: int | None = None) -> None:
        self.path = Path(path)
        self.header, self._arrays = file_format.read(path, KIND)
        refuse_other_vocabulary(path, self.header["vocabulary"], vocabulary)
        own = int(self.header["vocab_size"])
        if vocab_size is not None and own > vocab_size:
            raise ValueError(
                f"{path}: its tokens go up to {own - 1}; expected ids below {vocab_size}; make it again with the "
                "target's tokenizer"
            )
        tokens, suffixes = self._arrays["tokens"], self._arrays["suffixes"]
        if not 2 <= len(tokens) == len(suffixes):
            raise ValueError(f"{path}: got {len(suffixes)} suffixes of {len(tokens)} tokens; make it again")
        damaged = find_disorder(tokens, suffixes, own)
        if damaged is not None:
            raise ValueError(f"{path}: its suffixes are not in order at rank {damaged}; it is damaged; make it again")
        self.array = structures().Array(tokens, suffixes, own)

    @property
    def num_tokens(self) -> int:
        """Tokens, separators not counted."""
        return int(self.header["tokens"])

    @property
    def num_documents(self) -> int:
        """Documents."""
        return int(self.header["documents"])

    @property
    def vocab_size(self) -> int:
        """The separator, one above the largest id."""
        return int(self.header["vocab_size"])

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return self.path.stat().st_size

    def verify(self, report: file_format.Report | None = None) -> None:
        """Reads the whole file and compares checksums.

        Args:
            report: Called with the bytes of each part.

        Raises:
            ValueError: If an array is not as it was written.
        """
        file_format.verify(self.path, self.header, self._arrays, report)
