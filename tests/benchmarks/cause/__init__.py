"""How well the log of an unmodified script tells the cause of a NaN that happens once: `python -m tests.benchmarks.cause`."""
