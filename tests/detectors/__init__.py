"""Detectors: their laws, their formulas, what each is for."""
