"""The HTTP server of a run."""
