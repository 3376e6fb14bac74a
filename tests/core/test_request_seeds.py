"""Keys of requests: equal on all ranks, inside int64, and of one request alone where it matters."""

from __future__ import annotations

import torch

from specdec_fast.core.request_seeds import request_seed, seeds_with_ids


def test_requests_without_seeds_have_one_of_their_own() -> None:
    assert request_seed(None, 0, "a") == request_seed(None, 0, "a"), "on every rank"
    assert len({request_seed(None, engine, name) for engine in (0, 1) for name in ("a", "b", "c")}) == 6
    assert request_seed(7, 5, "a") == 7 and request_seed(-5, 0, "a") == 2**63 - 5
    assert request_seed(None, 0, "a") == 5546832457715113043, "of every version"


def test_ids_are_part_of_the_key_if_asked() -> None:
    seeds, ids = [42, 42, -1, 2**63 - 1], ["a", "b", "\ud800", ""]
    keys = [request_seed(seed, 9, name, with_id=True) for seed, name in zip(seeds, ids)]
    assert len(set(keys)) == 4 and not set(keys) & set(seeds) and all(0 <= key < 2**63 for key in keys)
    assert seeds_with_ids(torch.tensor(seeds), ids).tolist() == keys
