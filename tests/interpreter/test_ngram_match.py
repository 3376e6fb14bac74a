"""ngram_match in Triton: the reference's matches over ragged histories, for any tiles, in guarded memory."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.interpreter import guarded

from specdec_kernels import ngram_match, use_backend

pytest.importorskip("triton")
launch = import_module("specdec_kernels.ops.ngram_match.launch")


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Histories of a few tokens span several tiles and pieces."""
    monkeypatch.setattr(launch, "TILE", 8)
    monkeypatch.setattr(launch, "OTHER_TILE", 16)
    monkeypatch.setattr(launch, "ROWS", 4)


HISTORIES = st.integers(0, 3).flatmap(lambda most: st.lists(st.lists(st.integers(0, most), max_size=40), max_size=4))


@pytest.mark.usefixtures("small_tiles")
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    histories=HISTORIES,
    n_min=st.integers(1, 3),
    more=st.integers(0, 3),
    wanted=st.sampled_from([0, 1, 9]),
    frequent=st.booleans(),
    room=st.sampled_from([0, 50]),
)
def test_matches_equal_those_of_the_reference(
    histories: list[list[int]], n_min: int, more: int, wanted: int, frequent: bool, room: int
) -> None:
    flat: list[int] = []
    starts = []
    for text in histories:
        starts.append(len(flat))
        flat += text + [9] * max(0, room - len(text))
    where = (
        guarded(torch.tensor(flat, dtype=torch.int64)),
        guarded(torch.tensor(starts, dtype=torch.int64)),
        guarded(torch.tensor([len(text) for text in histories], dtype=torch.int32)),
    )
    results = []
    for backend in ("reference", "triton"):
        with use_backend(backend):
            results.append(ngram_match(*where, n_min + more, n_min, wanted, frequent))
    for want, got in zip(*results, strict=True):
        assert want.dtype == got.dtype and torch.equal(want, got)


@pytest.mark.parametrize("frequent", [False, True])
def test_a_long_history(frequent: bool) -> None:
    """Tiles of the real size, and hundreds of occurrences."""
    text = torch.randint(0, 3, (2100,), generator=torch.Generator().manual_seed(2))
    where = guarded(text), torch.tensor([0, 600]), torch.tensor([2100, 1500], dtype=torch.int32)
    results = []
    for backend in ("reference", "triton"):
        with use_backend(backend):
            results.append(ngram_match(*where, 3, 1, 5, frequent))
    assert all(torch.equal(want, got) for want, got in zip(*results, strict=True))


@pytest.mark.usefixtures("small_tiles")
def test_the_caller_s_memory_and_histories_beyond_the_tokens() -> None:
    text = guarded(torch.tensor([1, 2, 7, 3, 1, 2, 7, 4, 1, 2, 8, 5, 1, 2] * 3))
    starts, lengths = torch.tensor([0, 30, -1, 3]), torch.tensor([14, 14, 5, -2], dtype=torch.int32)
    with use_backend("triton"):
        size = ngram_match.workspace_size(text, starts, lengths, 3, 2, 3, True)
    workspace = guarded(torch.full((size,), 255, dtype=torch.uint8))
    out = torch.zeros(4, 3, dtype=torch.int64), torch.zeros(4, dtype=torch.int32)
    with use_backend("triton"):
        found = ngram_match(text, starts, lengths, 3, 2, 3, True, out=out, workspace=workspace)
        assert found[0] is out[0] and out[0].tolist() == [[7, 4, 1], [-1] * 3, [-1] * 3, [-1] * 3]
        assert out[1].tolist() == [2, 0, 0, 0]
        with pytest.raises(ValueError, match="ngram_match: workspace is"):
            ngram_match(text, starts, lengths, 3, 2, 3, True, out=out, workspace=workspace[16:])
    for backend in ("cpu", "reference"):
        with use_backend(backend):
            ngram_match(text, starts[:1], lengths[:1], 3, 2, 2, out=(out[0][:1, :2].contiguous(), out[1][:1]))
            assert out[1].tolist() == [2, 0, 0, 0]
            with pytest.raises(ValueError, match=r"ngram_match: out\[0\] is"):
                ngram_match(text, starts[:1], lengths[:1], 3, 2, 3, True, out=out)
