"""traversal_verify, traversal_thresholds: extension against reference, keyed law, edges, errors."""

from __future__ import annotations

import torch
from oracles.proposal_cases import decode
from oracles.proposal_checks import ProposalChecks, models, needs_extension, p_value
from torch import Tensor

from specdec_kernels import traversal_thresholds, traversal_verify, use_backend
from specdec_kernels.random import ACCEPT, uniform, words


class TestTraversalVerify(ProposalChecks):
    verify, thresholds = traversal_verify, traversal_thresholds


@needs_extension
def test_coins_keyed_by_a_token_s_own_position_would_be_noticed() -> None:
    """The rule looks at coins of nodes below the place where it stops: the next step must not see these again."""
    p, q = models()
    depth = torch.tensor([0, 1, 1, 2, 2])
    sibling = torch.tensor([0, 0, 1, 0, 1])

    def reused(seeds: Tensor, roots: Tensor, nodes: int) -> Tensor:
        return uniform(words(seeds[:, None], roots[:, None] + depth, sibling, ACCEPT, 0))

    with use_backend("cpu"):
        assert p_value(decode(traversal_verify, p, q, 60_000, 4, reused), p) < 1e-6
