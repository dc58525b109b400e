"""Faults of the training loop that follow from events, not from numbers: what is cleared, clipped, used, and when."""
