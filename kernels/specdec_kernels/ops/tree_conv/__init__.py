"""tree_conv: causal convolution along the ancestors of packed nodes."""

from __future__ import annotations

from ...dispatch.operator import Op
from .reference import tree_conv as _reference

tree_conv = Op("tree_conv", _reference, [])

__all__ = ["tree_conv"]
