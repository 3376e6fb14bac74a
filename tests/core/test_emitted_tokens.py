"""The tokens of a step, against a loop over its requests."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec_fast.core.emitted_tokens import tokens_after_path

INT = torch.int32


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=5))
def test_tokens_of_paths(requests: list[tuple[int, int]]) -> None:
    """Each request has a path of some accepted nodes among others, in any order."""
    width = 1 + max(accepted for accepted, _ in requests)
    tokens: list[int] = []
    paths, wanted, last = [], [], []
    for row, (accepted, others) in enumerate(requests):
        root = len(tokens)
        inner = root + 1 + torch.randperm(accepted + others)[:accepted].sort().values
        tokens += range(100 * row, 100 * row + 1 + accepted + others)
        last.append(9000 + row)
        paths.append([root, *inner.tolist()] + [-1] * (width - 1 - accepted))
        wanted.append([tokens[node] for node in inner.tolist()] + [last[-1]] + [-1] * (width - 1 - accepted))
    counts = torch.tensor([accepted for accepted, _ in requests], dtype=INT)
    for dtype in (torch.int64, INT):  # those of SGLang and vLLM may be narrow
        packed = torch.tensor(tokens, dtype=dtype)
        found = tokens_after_path(packed, torch.tensor(paths, dtype=INT), counts, torch.tensor(last))
        assert found.tolist() == wanted and found.dtype == INT


def test_no_requests() -> None:
    none = torch.empty(0, dtype=torch.int64)
    assert tokens_after_path(none, torch.empty(0, 3, dtype=INT), none.int(), none).shape == (0, 3)
