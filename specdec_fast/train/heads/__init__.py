"""Training of Medusa, blockwise and EAGLE heads over a frozen target."""
