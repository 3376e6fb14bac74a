"""Sampling parameters, logits processors and the target's distributions."""
