"""recursive_rejection_verify, recursive_rejection_thresholds: extension against reference, keyed distribution,
edges, errors.
"""

from __future__ import annotations

from oracles.proposal_checks import ProposalChecks

from specdec_kernels import recursive_rejection_thresholds, recursive_rejection_verify


class TestRecursiveRejectionVerify(ProposalChecks):
    verify, thresholds = recursive_rejection_verify, recursive_rejection_thresholds
