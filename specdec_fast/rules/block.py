"""Block verification of chains. Accepts at least as many tokens as rule `rejection`.

The path ends at the last node whose uniform passes, even if an earlier uniform fails. The thresholds depend on the
whole chain: at least i tokens are accepted with probability w_i = min(1, w_{i-1} p/q). Deterministic tokens are point
masses (q = 1), for which the rule gains nothing. Uniforms are keyed and fresh, so the distribution is exact, but the
text depends on the draft. Tests: tests/rules/test_block.py, tests/kernels/test_rejection_verify.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from specdec_fast.rules.rejection import Rejection


@dataclass(frozen=True, slots=True)
class Block(Rejection):
    """Verifies each chain as a whole, from its last token to its first. Chains may be sampled or deterministic.

    Source:
        Sun et al. 2025 (block verification), algorithm 2.
    """

    name: str = "block"
    from_leaves: bool = True


RULE = Block()
