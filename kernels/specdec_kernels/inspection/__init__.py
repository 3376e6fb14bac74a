"""Times and machine code of the operators."""
