"""Choosing what a drafter is made of by measuring: `specdec tune`."""
