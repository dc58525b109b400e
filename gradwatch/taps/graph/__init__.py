"""The autograd graph: `leaves` that a backward fills, `nodes` and their numbers, `around_backward` what runs it, `anomaly` its mode."""
