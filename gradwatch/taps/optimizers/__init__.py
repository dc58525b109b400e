"""Optimizers: their creation, their param groups, those that another one wraps."""
