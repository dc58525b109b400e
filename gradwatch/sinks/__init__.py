"""Receivers of Records: the `Sink` protocol, its registry, and one kind of sink a file or folder."""

from gradwatch.sinks.registry import Sink, find_sink, make_sink, register_sink, sink_names

__all__ = ["Sink", "find_sink", "make_sink", "register_sink", "sink_names"]
