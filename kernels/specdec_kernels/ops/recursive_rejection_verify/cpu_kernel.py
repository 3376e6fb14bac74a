"""C++ backend of recursive_rejection_verify and recursive_rejection_thresholds."""

from __future__ import annotations

import torch

from .._proposals.cpu_call import thresholds_with, verify_with
from .reference import check

recursive_rejection_verify = verify_with(torch.ops.specdec.recursive_rejection_verify.default, check)
recursive_rejection_thresholds = thresholds_with(torch.ops.specdec.recursive_rejection_thresholds.default, check)
