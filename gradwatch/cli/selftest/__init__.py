"""`gradwatch selftest -- COMMAND`: faults in a script's own first steps, to see whether rules find them."""

from gradwatch.cli.selftest.command import add_parser

__all__ = ["add_parser"]
