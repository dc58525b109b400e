"""The `gradwatch` command."""
