"""Packed drafts, distributions and names: what all other packages build on."""
