"""What the log of an unmodified script tells of a NaN that happens once: `python -m tests.benchmarks.cause`."""
