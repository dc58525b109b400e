"""`gradwatch top`: a run as it goes on, in a terminal."""

from gradwatch.cli.top.command import add_parser

__all__ = ["add_parser"]
