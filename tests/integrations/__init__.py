"""Frameworks, through their integrations and unmodified."""
