"""Independent answers for the tests: slow and simple, written from the definitions and not from the engine's
code.
"""
