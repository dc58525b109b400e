"""One accumulation window of one optimizer: which gradients arrived in it, their norms, what changed them since."""
