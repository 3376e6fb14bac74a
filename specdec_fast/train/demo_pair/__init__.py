"""The recipe of the bundled pair of models."""
