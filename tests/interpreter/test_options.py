"""Sample calls with options on Triton's kernels, in the patched interpreter; tests/gpu runs them on a GPU."""

from __future__ import annotations

import pytest

from specdec_kernels import OPS
from specdec_kernels.testing import agreement
from specdec_kernels.testing.samples_attention import Sizes
from specdec_kernels.testing.samples_options import OPTIONS

SIZES = Sizes(rows=2, nodes=5, length=20, heads=4, kv_heads=2, width=32, vocab=1100)
"""More than one noise block, more than one page."""
HERE = [op for op in OPTIONS if any(backend.name == "triton" for backend in OPS[op].backends)]


@pytest.mark.parametrize(("op", "case"), [(op, case) for op in HERE for case in OPTIONS[op]])
def test_calls_with_options_equal_the_reference(op: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "INTERPRETED", False)  # here it is patched
    found = [row for row in agreement.check([op], sizes=SIZES, only=(case,)) if row.backend == "triton"]
    assert [row for row in found if not (row.ran and row.agrees)] == [] and found
