"""Recorded calls replayed: forward and backward again, with the state of the training restored."""
