"""The norm of any gradient."""
