"""tree_grow in Triton against the reference: the same trees, level by level."""

from __future__ import annotations

import pytest
from oracles.growth import grown

from specdec_kernels import use_backend

pytest.importorskip("triton")


@pytest.mark.parametrize("seed", range(6))
def test_the_same_trees_as_the_reference(seed: int) -> None:
    with use_backend("reference"):
        want = grown(seed)
    with use_backend("triton"):
        assert grown(seed) == want
