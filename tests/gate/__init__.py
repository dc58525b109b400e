"""Every promise at its number, by one command: `python -m tests.gate`."""
