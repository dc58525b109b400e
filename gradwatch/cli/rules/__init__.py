"""`gradwatch rules …`: check, test, explain and list rule files."""

from gradwatch.cli.rules.commands import add_parser

__all__ = ["add_parser"]
