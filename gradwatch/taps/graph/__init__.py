"""The autograd graph, read: `leaves` the tensors that a backward fills."""
