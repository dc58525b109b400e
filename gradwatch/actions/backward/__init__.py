"""Clipping inside the backward: hooks, the bounds in force, and the norms before them."""
