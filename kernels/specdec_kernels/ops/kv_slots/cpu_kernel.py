"""C++ backend of kv_slots: one call, no Python in between."""

from __future__ import annotations

import torch

kv_slots = torch.ops.specdec.kv_slots.default
