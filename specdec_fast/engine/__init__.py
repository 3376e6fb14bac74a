"""The decoding loop: requests, state, prefill, steps and outputs."""
