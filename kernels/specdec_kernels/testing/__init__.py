"""Sample calls of every operator, and the comparison of its backends with the reference."""
