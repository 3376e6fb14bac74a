"""Datastores: a token stream on disk with its suffix array, mapped into memory and looked up by suffix.

He et al. 2023 (REST, section 3.1) for the idea. The stream holds documents, each with a separator behind it (the id one
above the vocabulary); tokens take two bytes where the vocabulary allows it, positions four below 2**32 tokens.
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

_PIECE = 1 << 24  # places that are looked at together
_PROBES, _COMPARED = 64, 8  # pairs of neighbours that opening looks at, and tokens of each


def suffix_array(tokens: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Positions of a stream of unsigned tokens [n] in the order of the suffixes that start there: uint32 or int64 [n].

    Sorted by divsufsort where pydivsufsort is installed (extra: datastore), in 5 bytes of memory per byte of the stream
    (9 from 2 GiB on) and those of the answer; else by doubling in numpy, which takes several times as long and as much.
    """
    dtype = np.uint32 if len(tokens) < 2**32 else np.int64
    try:
        from pydivsufsort import divsufsort
    except ImportError:
        log.warning("datastore: pydivsufsort is not installed, so numpy sorts; %s", install_hint("datastore"))
        return _double(np.asarray(tokens)).astype(dtype)
    unit = tokens.dtype.itemsize  # it sorts bytes: tokens with their largest first are in the same order
    places = divsufsort(tokens.astype(tokens.dtype.newbyteorder(">")).view(np.uint8))
    found, count = np.empty(len(tokens), dtype), 0
    for start in range(0, len(places), _PIECE):
        piece = places[start : start + _PIECE]
        own = piece[piece % unit == 0]
        found[count : count + len(own)] = own // unit
        count += len(own)
    return found


def _double(tokens: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
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
    """Write a datastore of documents (token ids) to a file.

    vocab_size: ids are below it; vocabulary: fingerprint of the tokenizer; report: called with what is being done
    ("reading", "sorting", "writing") and the tokens so far. Raises ValueError for ids that are out of range and where
    there is no token at all.
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


def out_of_order(tokens: np.ndarray[Any, Any], suffixes: np.ndarray[Any, Any], vocab_size: int) -> int | None:
    """A rank at which an array cannot be that of the suffixes of a stream, or None: looks at a few pairs of neighbours,
    evenly spread, and at the first tokens of both. Less than a millisecond where these pages are in memory.
    """
    size = len(tokens)
    ranks = np.unique(np.linspace(0, size - 2, _PROBES).astype(np.int64))
    places = np.stack([suffixes[ranks], suffixes[ranks + 1]]).astype(np.int64)
    inside = ((places >= 0) & (places < size)).all(0)
    at = np.where(inside, places, 0)[:, :, None] + np.arange(_COMPARED)
    found = np.where(at < size, tokens[np.minimum(at, size - 1)].astype(np.int64), -1)  # a shorter suffix comes first
    first = (found[0] != found[1]).argmax(1)  # 0 where all are equal
    low, high = (np.take_along_axis(own, first[:, None], 1)[:, 0] for own in found)
    wrong = ~inside | (places[0] == places[1]) | (low > high) | (found > vocab_size).any((0, 2))
    return int(ranks[wrong.argmax()]) if wrong.any() else None


class Datastore:
    """An open datastore. Opening looks at a sample of it, `verify` at everything.

    vocabulary, vocab_size: what the target's tokenizer is expected to be ("" and None: anything).
    Raises ValueError for a file that is none, was cut off or is damaged, or belongs to another tokenizer.
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
        damaged = out_of_order(tokens, suffixes, own)
        if damaged is not None:
            raise ValueError(f"{path}: its suffixes are not in order at rank {damaged}; it is damaged; make it again")
        self.array = structures().Array(tokens, suffixes, own)

    @property
    def num_tokens(self) -> int:
        """Tokens, separators not counted."""
        return int(self.header["tokens"])

    @property
    def num_documents(self) -> int:
        return int(self.header["documents"])

    @property
    def vocab_size(self) -> int:
        return int(self.header["vocab_size"])

    @property
    def num_bytes(self) -> int:
        return self.path.stat().st_size

    def verify(self, report: file_format.Report | None = None) -> None:
        """Read all of it and raise ValueError where it is not what was written. report: called with bytes done."""
        file_format.verify(self.path, self.header, self._arrays, report)
