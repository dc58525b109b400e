"""Prometheus: the sink, its metric families, and their ways out (endpoint, textfile, Pushgateway)."""
