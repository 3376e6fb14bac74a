"""ordered_verify, ordered_thresholds: extension against reference, keyed law, edges, errors."""

from __future__ import annotations

from oracles.proposal_checks import ProposalChecks

from specdec_kernels import ordered_thresholds, ordered_verify


class TestOrderedVerify(ProposalChecks):
    verify, thresholds = ordered_verify, ordered_thresholds
