"""The monitoring stack as files: what `gradwatch deploy export` writes, from the same tables and rule files that the
exporter and the engine use.

`alerts` and `recording_rules` are the rules of Prometheus, `prometheus_rule_files` what runs them, `export` writes the
folder. Nothing here needs torch, a network or a running server.
"""

from gradwatch.monitoring.export import Options, export, files

__all__ = ["Options", "export", "files"]
