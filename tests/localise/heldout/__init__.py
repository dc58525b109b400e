"""Held-out faulty trainings, written from the issue's text alone, before gradwatch.localise was looked at."""
