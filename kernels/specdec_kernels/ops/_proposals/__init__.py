"""Draft chains and trees with proposals, shared by the operators that use draft distributions."""
