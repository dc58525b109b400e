"""Arrived gradients and their norms: the measurement of one accumulation window."""
