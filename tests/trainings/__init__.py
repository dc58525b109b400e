"""Trainings as users write them, bare and under `gradwatch run --rules observe-only`: nothing may differ.

`python -m tests.trainings` runs all of them and prints a table; the suite runs the few that are marked `quick`.
"""
