"""Columns beyond the norms: loss, module taps, norms before the reduction, values of gradients, update ratios."""
