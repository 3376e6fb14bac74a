"""How drafters pick the tokens of their nodes. Tests: tests/core/test_draft.py."""

from __future__ import annotations

from enum import IntEnum


class ProposalKind(IntEnum):
    """How a node's token was picked, given the path to its parent.

    Rules that use draft distributions verify each kind in its own way.

    Attributes:
        DETERMINISTIC: A function of committed data and of replay noise. Its distribution is a point mass.
        SAMPLED: Sampled from its distribution, independently of its siblings.
        SAMPLED_WITHOUT_EARLIER: Sampled from its distribution without the tokens that earlier siblings sampled from the
            same distribution.
        SAMPLED_WITHOUT_DETERMINISTIC: Sampled from its distribution without the tokens of its deterministic siblings.
    """

    DETERMINISTIC = 0
    SAMPLED = 1
    SAMPLED_WITHOUT_EARLIER = 2
    SAMPLED_WITHOUT_DETERMINISTIC = 3
