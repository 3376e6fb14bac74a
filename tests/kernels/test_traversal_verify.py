"""traversal_verify, traversal_thresholds: extension against reference, keyed distribution, edges, errors."""

from __future__ import annotations

import pytest
import torch
from oracles.proposal_cases import decode, dist, int32
from oracles.proposal_checks import BACKENDS, ProposalChecks, models, needs_extension, p_value
from torch import Tensor

from specdec_kernels import traversal_thresholds, traversal_verify, use_backend
from specdec_kernels.random import ACCEPT, uniform, words


class TestTraversalVerify(ProposalChecks):
    verify, thresholds = traversal_verify, traversal_thresholds


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_node_without_a_distribution_is_a_leaf(backend: str) -> None:
    torch.manual_seed(4)
    level, draft = torch.randn(5, 40), dist(torch.randn(3, 40))
    level[1] = float("nan")
    tokens, marks = torch.tensor([0, 3, 3, 5, 6]), torch.tensor([0, 1, 1, 1, 1], dtype=torch.int8)
    sources = int32([-1, 0, 0, 1, 1])

    def accept(first: list[int], sibling: list[int]) -> list[float]:
        with use_backend(backend):
            found, _ = traversal_thresholds(
                tokens, int32([0, 5]), int32(first), int32(sibling), marks, sources, dist(level), draft, None
            )
        return found.tolist()

    with_children = accept([1, 3, -1, -1, -1], [-1, 2, -1, 4, -1])
    leaf = accept([1, -1, -1, -1, -1], [-1, 2, -1, -1, -1])
    assert with_children[:3] == leaf[:3] and with_children[3:] == [0, 0] and 0 < leaf[1] < 1


@needs_extension
def test_uniforms_keyed_by_a_token_s_own_position_are_detected() -> None:
    """The rule reads uniforms of nodes below the place where it stops: the next step must not read these again."""
    p, q = models()
    depth = torch.tensor([0, 1, 1, 2, 2])
    sibling = torch.tensor([0, 0, 1, 0, 1])

    def reused(seeds: Tensor, roots: Tensor, nodes: int) -> Tensor:
        return uniform(words(seeds[:, None], roots[:, None] + depth, sibling, ACCEPT, 0))

    with use_backend("cpu"):
        assert p_value(decode(traversal_verify, p, q, 60_000, 4, reused), p) < 1e-6
