"""Which gradients arrived, and what they were."""
