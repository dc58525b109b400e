"""Processes that commands start, and signals that end commands."""
