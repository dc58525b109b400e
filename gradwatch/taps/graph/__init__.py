"""The autograd graph: leaves that a backward fills, numbers of nodes, a function around each backward, anomaly mode."""
