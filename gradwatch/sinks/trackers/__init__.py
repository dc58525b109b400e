"""Experiment trackers: one row of numbers a step, for W&B, MLflow and TensorBoard."""
