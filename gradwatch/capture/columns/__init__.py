"""Columns beyond the norms: losses, module taps, norms before the reduction, sampled looks."""
