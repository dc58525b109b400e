"""`gradwatch doctor`: `torch_probes` tries hooks, `last_run` shows a run, `watching_cost` measures the cost of a watch."""

from gradwatch.cli.doctor.command import add_parser

__all__ = ["add_parser"]
