"""C++ backend of traversal_verify and traversal_thresholds."""

from __future__ import annotations

import torch

from .._proposals.cpu_call import thresholds_with, verify_with
from .reference import check

traversal_verify = verify_with(torch.ops.specdec.traversal_verify.default, check)
traversal_thresholds = thresholds_with(torch.ops.specdec.traversal_thresholds.default, check)
