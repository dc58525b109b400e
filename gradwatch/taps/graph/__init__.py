"""The autograd graph: `leaves` that a backward fills, `nodes` and numbers, backwards run `around`, `anomaly` mode."""
