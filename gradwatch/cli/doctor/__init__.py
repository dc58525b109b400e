"""`gradwatch doctor`: `torch_probes` tries hooks, `last_run` shows a run, `watching_cost` measures what one costs."""

from gradwatch.cli.doctor.command import add_parser

__all__ = ["add_parser"]
