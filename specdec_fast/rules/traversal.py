"""Traversal: leaf-to-root verification on trees (Weng et al. 2025, algorithm 1).

The coins of a node's descendants are looked at before its own, so that a path is kept whenever something below it can
be: at least as many accepted tokens as rule recursive_rejection for the same draft. On chains it is block
verification (Sun et al. 2025). Takes every proposal distribution, point masses and hybrid nodes included; the drawn
child of a hybrid node should come first. Tests: tests/rules/test_traversal.py, tests/kernels/test_traversal_verify.py.
"""

from __future__ import annotations

from specdec_fast.rules.recursive_rejection import TreeRule
from specdec_kernels import traversal_thresholds, traversal_verify

RULE = TreeRule("traversal", traversal_verify, traversal_thresholds, from_leaves=True)
