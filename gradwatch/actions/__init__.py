"""What a decision does to the gradients of one step: apply, clip, drop a micro-batch."""
