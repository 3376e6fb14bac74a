"""The commands of `specdec`, one module each, and what they share. Heavy imports happen inside functions."""
