"""Models that score packed trees."""

from specdec_fast.targets.huggingface import HuggingFaceTarget

__all__ = ["HuggingFaceTarget"]
