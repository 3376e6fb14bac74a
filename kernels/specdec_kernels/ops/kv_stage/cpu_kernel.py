"""C++ backend of kv_stage: one call, no Python in between."""

from __future__ import annotations

import torch

kv_stage = torch.ops.specdec.kv_stage.default
