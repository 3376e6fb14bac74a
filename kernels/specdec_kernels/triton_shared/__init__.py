"""Triton functions that several kernels share, and the compilation of their launches."""
