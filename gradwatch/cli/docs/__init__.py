"""`gradwatch docs`: the documentation that travels with the package, part of it made from the code."""

from gradwatch.cli.docs.command import add_parser

__all__ = ["add_parser"]
