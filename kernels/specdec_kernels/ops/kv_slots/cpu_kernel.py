"""C++ backend of kv_slots: the registered operator itself."""

from __future__ import annotations

import torch

kv_slots = torch.ops.specdec.kv_slots.default
