"""Tests of the monitoring stack: what is generated, what checks it, and the real servers it runs on."""
