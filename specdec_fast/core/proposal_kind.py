"""How drafters pick the tokens of their nodes. Tests: tests/core/test_draft.py."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from specdec_fast.core.former_names import RENAMED_PICKS
from specdec_kernels.unknown_names import unknown_name

PICKS = ("coupled", "sampled", "greedy")
"""Values of a drafter's option `pick`: with the target's replay noise, from the draft distribution, or its arg-max."""
DETERMINISTIC_PICKS = ("coupled", "greedy")
"""Values of `pick` for drafters that have no distribution to sample from."""


def check_pick(drafter: str, pick: str, picks: Sequence[str] = PICKS) -> None:
    """Checks a drafter's option `pick`.

    Args:
        drafter: Name of the drafter, for the message.
        pick: The value.
        picks: Values that the drafter accepts.

    Raises:
        ValueError: If the value is not one of them.
    """
    if pick not in picks:
        raise ValueError(unknown_name(f"{drafter} pick", pick, picks, renamed=RENAMED_PICKS))


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
