"""Dispatch of operators: backend selection, argument checks, devices, and registration with torch."""
