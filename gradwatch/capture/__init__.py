"""Which gradients arrived and what they were: the measurement of one accumulation window."""
