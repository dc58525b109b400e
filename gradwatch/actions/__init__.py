"""Effects of a decision on the gradients of one step: apply, clip, drop a micro-batch."""
