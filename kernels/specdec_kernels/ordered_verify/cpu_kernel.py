"""C++ backend of ordered_verify and ordered_thresholds."""

from __future__ import annotations

import torch

from ..proposals_cpu import thresholds_with, verify_with
from .reference import check

ordered_verify = verify_with(torch.ops.specdec.ordered_verify.default, check)
ordered_thresholds = thresholds_with(torch.ops.specdec.ordered_thresholds.default, check)
