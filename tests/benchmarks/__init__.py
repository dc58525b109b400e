"""What gradwatch costs, measured beside what others cost: `python -m tests.benchmarks.overhead`."""
