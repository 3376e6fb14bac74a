"""One module per plot of measured numbers."""
