"""Tests of what a training loop does with gradients: cleared, clipped, used, and when."""
