"""A run as it goes on: what its journals, or its /metrics, say of the last steps, as plain data to be drawn."""

from gradwatch.report.live.journal_source import JournalSource
from gradwatch.report.live.metrics_source import MetricsSource
from gradwatch.report.live.view_records import LiveView

__all__ = ["JournalSource", "LiveView", "MetricsSource"]
