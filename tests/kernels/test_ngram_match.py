"""ngram_match: every backend against a search written from the definition, over ragged histories and bad arguments."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec_kernels import ngram_match, use_backend

BACKENDS = [backend.name for backend in ngram_match.backends if backend.name != "triton"]  # see tests/interpreter


def served(backend: str) -> bool:
    return next(b for b in ngram_match.backends if b.name == backend).missing() is None


def search(text: list[int], n_max: int, n_min: int, wanted: int, frequent: bool) -> tuple[list[int], int]:
    """Searches the whole text for each length."""
    for size in range(min(n_max, len(text)), n_min - 1, -1):
        ends = [end for end in range(size, len(text)) if text[end - size : end] == text[-size:]]
        if not ends:
            continue
        if frequent:
            counts = Counter(text[end] for end in ends)
            ends = [end for end in ends if counts[text[end]] == max(counts.values())]
        grown = list(text)
        for at in range(wanted):
            grown.append(grown[ends[-1] + at])
        return grown[len(text) :], size
    return [-1] * wanted, 0


HISTORIES = st.integers(1, 3).flatmap(lambda most: st.lists(st.lists(st.integers(0, most), max_size=24), max_size=12))


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=120, deadline=None)
@given(
    histories=HISTORIES,
    n_min=st.integers(1, 3),
    more=st.integers(0, 3),
    wanted=st.integers(0, 9),
    frequent=st.booleans(),
    buffer=st.booleans(),
)
def test_against_a_search(
    backend: str, histories: list[list[int]], n_min: int, more: int, wanted: int, frequent: bool, buffer: bool
) -> None:
    """Packed histories, and rows of a larger buffer."""
    if not served(backend):
        pytest.skip(f"backend {backend} is not available here")
    flat: list[int] = []
    starts = []
    for text in histories:
        starts.append(len(flat))
        flat += text + ([9] * (30 - len(text)) if buffer else [])
    with use_backend(backend):
        drafts, matched = ngram_match(
            torch.tensor(flat, dtype=torch.int64),
            torch.tensor(starts, dtype=torch.int64),
            torch.tensor([len(text) for text in histories], dtype=torch.int32),
            n_min + more,
            n_min,
            wanted,
            frequent,
        )
    want = [search(text, n_min + more, n_min, wanted, frequent) for text in histories]
    assert drafts.tolist() == [tokens for tokens, _ in want] and drafts.shape == (len(histories), wanted)
    assert matched.tolist() == [size for _, size in want] and matched.dtype == torch.int32


@pytest.mark.parametrize("backend", BACKENDS)
def test_by_hand(backend: str) -> None:
    """7 follows (1, 2) twice and 8 once, at the end: the last match copies 8, the most frequent one the later 7."""
    if not served(backend):
        pytest.skip(f"backend {backend} is not available here")
    text = torch.tensor([1, 2, 7, 3, 1, 2, 7, 4, 1, 2, 8, 5, 1, 2])
    history = (text, torch.tensor([0]), torch.tensor([14], dtype=torch.int32))
    with use_backend(backend):
        last, frequent = ngram_match(*history, 3, 2, 3), ngram_match(*history, 3, 2, 3, True)
        strided = ngram_match(torch.stack([text, text], 1)[:, 0], *history[1:], 3, 2, 3)
    assert last[0].tolist() == [[8, 5, 1]] == strided[0].tolist() and last[1].tolist() == [2]
    assert frequent[0].tolist() == [[7, 4, 1]]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_min": 0}, "n_min is 0 and n_max is 3; expected 1 <= n_min <= n_max"),
        ({"n_min": 4}, "n_min is 4 and n_max is 3"),
        ({"num_tokens": -1}, "num_tokens is -1; expected 0 or more"),
        ({"lengths": torch.tensor([3, 3], dtype=torch.int32)}, r"row 1 is \[3, 6\) with length 3; expected a part"),
        ({"lengths": torch.tensor([3, -1], dtype=torch.int32)}, "row 1 is"),
        ({"starts": torch.tensor([-1, 0])}, "row 0 is"),
        ({"lengths": torch.tensor([3], dtype=torch.int32)}, "lengths has shape"),
        ({"tokens": torch.zeros(5, dtype=torch.int32)}, "tokens has dtype"),
    ],
)
def test_bad_arguments_are_refused(backend: str, change: dict, message: str) -> None:
    if not served(backend):
        pytest.skip(f"backend {backend} is not available here")
    arguments = {
        "tokens": torch.zeros(5, dtype=torch.int64),
        "starts": torch.tensor([0, 3]),
        "lengths": torch.tensor([3, 2], dtype=torch.int32),
        "n_max": 3,
        "n_min": 2,
        "num_tokens": 4,
    }
    with use_backend(backend), pytest.raises(ValueError, match=f"ngram_match: .*{message}"):
        ngram_match(*(arguments | change).values())
