"""The live view of a run: from journals, from /metrics."""
