"""Oracles: independent expected results, slow and simple, written from the definitions, not from the engine's code."""
