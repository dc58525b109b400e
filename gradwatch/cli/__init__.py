"""The `gradwatch` command: `entry_point` reads the command line, each subcommand has a file of its own."""

from gradwatch.cli.entry_point import main

__all__ = ["main"]
