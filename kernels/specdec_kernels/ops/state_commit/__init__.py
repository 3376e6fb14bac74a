"""state_commit and window_commit: recurrent states and convolution windows after accepted paths."""

from __future__ import annotations

from ...dispatch.operator import Op
from .reference import state_commit as _state_reference
from .reference import window_commit as _window_reference

state_commit = Op("state_commit", _state_reference, [])
window_commit = Op("window_commit", _window_reference, [])

__all__ = ["state_commit", "window_commit"]
