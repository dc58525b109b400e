"""Processes of a command: the signals that end it, and the end of those that it has started."""
