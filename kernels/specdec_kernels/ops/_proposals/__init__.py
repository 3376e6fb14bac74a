"""Proposals on packed trees, shared by the rules that look at draft distributions."""
