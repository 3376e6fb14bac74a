"""C++ backend of kv_stage: the registered operator itself."""

from __future__ import annotations

import torch

kv_stage = torch.ops.specdec.kv_stage.default
