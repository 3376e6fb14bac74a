"""The keys of requests: which seed the random numbers of a request follow from.

All processes of an engine know the ids of its requests, so they find the same keys without a word to each other. A key
must not verify drafts that were made from the numbers of the same key. A drafter that learns across requests can make
such drafts, if two requests have one seed. Then the id of a request is part of its key. Under rule `replay` drafts
change no text, so the seed alone is the key.
Tests: tests/core/test_request_seeds.py, tests/integrations/test_sglang.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b

import torch
from torch import Tensor

from specdec_fast.core.device_transfer import host_to_device

SEED_BITS = 2**63 - 1
"""Mask of the bits that a key has."""


@lru_cache(maxsize=8192)
def id_seed(request_id: str) -> int:
    """Returns the hash of a request's id, 0 to 2**63 - 1.

    Args:
        request_id: The id, which all processes of the engine know.
    """
    digest = blake2b(request_id.encode("utf-8", "surrogatepass"), digest_size=8, person=b"specdec-request")
    return int.from_bytes(digest.digest(), "little") >> 1


def request_seed(seed: int | None, engine_seed: int, request_id: str, *, with_id: bool = False) -> int:
    """Returns the key of a request's random numbers, 0 to 2**63 - 1.

    Args:
        seed: The request's own seed, or None.
        engine_seed: Seed of the engine, for requests without one.
        request_id: The request's id.
        with_id: Whether the id is part of the key although the request has a seed.

    Returns:
        The seed itself where int64 holds it. Without a seed, or with `with_id`, a hash of seed and id.
    """
    if seed is not None and not with_id:
        return seed & SEED_BITS
    return ((engine_seed if seed is None else seed) & SEED_BITS) ^ id_seed(request_id)


def seeds_with_ids(seeds: Tensor, request_ids: Sequence[str]) -> Tensor:
    """Returns what `request_seed(..., with_id=True)` does for seeds on a device, which are not read.

    Args:
        seeds: Seeds of B requests, int64 [B].
        request_ids: Their ids.

    Returns:
        int64 [B], on the device of the seeds.
    """
    ids = host_to_device([id_seed(each) for each in request_ids], torch.int64, seeds.device)
    return (seeds & SEED_BITS) ^ ids
