"""The bounded HTTP server of a run, and where it listens."""
