"""Optimizers: `init` their making; `inner` those that another one wraps."""
