"""Trained heads: modules that read a target's hidden states, and the public layouts of their weights."""
