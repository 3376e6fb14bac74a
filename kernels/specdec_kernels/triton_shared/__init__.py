"""Triton functions that several kernels share, and how their launches are compiled."""
