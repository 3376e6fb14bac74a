"""Packed drafts, distributions and names, on which all other packages build."""
