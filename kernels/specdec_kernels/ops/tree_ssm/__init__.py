"""tree_ssm: the selective state space recurrence over packed trees."""

from __future__ import annotations

from ...dispatch.operator import Op
from .reference import tree_ssm as _reference

tree_ssm = Op("tree_ssm", _reference, [])

__all__ = ["tree_ssm"]
