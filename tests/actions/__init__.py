"""What a decision does to gradients and to the optimizer's step."""
