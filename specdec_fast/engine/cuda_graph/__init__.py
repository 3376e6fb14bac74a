"""The same decode step as a captured CUDA graph."""
