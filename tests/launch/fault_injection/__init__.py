"""Faults that a selftest puts into gradients."""
