"""tree_delta: the gated delta rule over packed trees."""

from __future__ import annotations

from ...dispatch.operator import Op
from .reference import tree_delta as _reference

tree_delta = Op("tree_delta", _reference, [])

__all__ = ["tree_delta"]
